// Weight-only linear at M <= 16, int8 in groups of 128 (a scale a row comes as such groups too).
#include "_weight_tiles_sm90.cuh"

#ifdef __CUDACC__
using TileBf16 = gm::Int8Tile<__nv_bfloat16, gm::kScaleEither>;
using TileFp16 = gm::Int8Tile<__half, gm::kScaleEither>;
#endif

#define GM_ENTRY gm_linear_int8_sm90
#define GM_TILE_BYTES 2080
#define GM_KERNELS(K) \
  K(int8_bf16, 2, 0, __nv_bfloat16, TileBf16, GM_ALL) K(int8_fp16, 1, 0, __half, TileFp16, GM_ALL)
#include "_linear_frag16_entry_sm90.h"
