// Weight-only linear at M <= 16, FP8 (E4M3) under a float32 scale for each row and 128 columns.
#include "_weight_tiles_sm90.cuh"

#ifdef __CUDACC__
using TileBf16 = gm::Fp8Tile<__nv_bfloat16>;
using TileFp16 = gm::Fp8Tile<__half>;
#endif

#define GM_ENTRY gm_linear_fp8_sm90
#define GM_TILE_BYTES 2112
#define GM_KERNELS(K) \
  K(fp8_bf16, 2, 0, __nv_bfloat16, TileBf16, GM_ALL) K(fp8_fp16, 1, 0, __half, TileFp16, GM_ALL)
#include "_linear_frag16_entry_sm90.h"
