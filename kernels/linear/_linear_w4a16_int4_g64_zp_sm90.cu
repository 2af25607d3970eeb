// Weight-only linear at M <= 16, int4 in groups of 64 with integer zero points.
#include "_weight_tiles_sm90.cuh"

#ifdef __CUDACC__
using TileBf16 = gm::Int4Tile<__nv_bfloat16, 2, true, gm::kScaleEither>;
using TileFp16 = gm::Int4Tile<__half, 2, true, gm::kScaleEither>;
#endif

#define GM_ENTRY gm_linear_int4_g64_zp_sm90
#define GM_TILE_BYTES 1120
#define GM_KERNELS(K)                                        \
  K(int4_g64_zp_bf16, 2, 0, __nv_bfloat16, TileBf16, GM_FEW) \
  K(int4_g64_zp_fp16, 1, 0, __half, TileFp16, GM_FEW)
#include "_linear_frag16_entry_sm90.h"
