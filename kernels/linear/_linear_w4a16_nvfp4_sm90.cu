// Weight-only linear at M <= 16, NVFP4.
#include "_weight_tiles_sm90.cuh"

#ifdef __CUDACC__
using TileBf16 = gm::Fp4Tile<__nv_bfloat16, 16>;
using TileFp16 = gm::Fp4Tile<__half, 16>;
#endif

#define GM_ENTRY gm_linear_nvfp4_sm90
#define GM_TILE_BYTES 1152
#define GM_KERNELS(K) \
  K(nvfp4_bf16, 2, 0, __nv_bfloat16, TileBf16, GM_ALL) K(nvfp4_fp16, 1, 0, __half, TileFp16, GM_ALL)
#include "_linear_frag16_entry_sm90.h"
