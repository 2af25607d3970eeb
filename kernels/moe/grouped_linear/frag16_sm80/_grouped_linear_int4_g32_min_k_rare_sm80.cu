// Grouped linear over Q4_K: int4 with minimums in groups of 32 under products as scales.
#define GM_ENTRY gm_grouped_linear_int4_g32_min_k_sm80
#define GM_TILE_BYTES 1216
#define GM_OPERANDS(K)                                           \
  K(bf16, any, gm::GgufOperand<__nv_bfloat16, 4, 4, true, true>) \
  K(fp16, any, gm::GgufOperand<__half, 4, 4, true, true>)

#include "entry.h"
