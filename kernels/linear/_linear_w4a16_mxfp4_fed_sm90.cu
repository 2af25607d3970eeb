// Weight-only linear at M <= 16, MXFP4, warp-specialised.
#include "_weight_tiles_sm90.cuh"

#ifdef __CUDACC__
using TileBf16 = gm::Fp4Tile<__nv_bfloat16, 32>;
using TileFp16 = gm::Fp4Tile<__half, 32>;
#endif

#define GM_ENTRY gm_linear_mxfp4_fed_sm90
#define GM_TILE_BYTES 1088
#define GM_KERNELS(K) \
  K(mxfp4_bf16, 2, 0, __nv_bfloat16, TileBf16, GM_ALL) K(mxfp4_fp16, 1, 0, __half, TileFp16, GM_ALL)
#include "_linear_frag16_fed_entry_sm90.h"
