// Weight-only linear at M <= 16, int4 in groups of 128, symmetric (a scale a row comes as such groups too),
// warp-specialised.
#include "_weight_tiles_sm90.cuh"

#ifdef __CUDACC__
using TileBf16 = gm::Int4Tile<__nv_bfloat16, 1, false, gm::kScaleBf16>;
using TileBf16Half = gm::Int4Tile<__nv_bfloat16, 1, false, gm::kScaleFp16>;
using TileFp16 = gm::Int4Tile<__half, 1, false, gm::kScaleEither>;
#endif

#define GM_ENTRY gm_linear_int4_g128_fed_sm90
#define GM_TILE_BYTES 1056
#define GM_KERNELS(K)                                               \
  K(int4_g128_bf16, 2, 2, __nv_bfloat16, TileBf16, GM_ALL)          \
  K(int4_g128_bf16_half, 2, 1, __nv_bfloat16, TileBf16Half, GM_ALL) \
      K(int4_g128_fp16, 1, 0, __half, TileFp16, GM_ALL)
#include "_linear_frag16_fed_entry_sm90.h"
