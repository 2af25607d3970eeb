// Grouped linear over Q5_1: int5 with minimums in groups of 32 under 16-bit scales.
#define GM_ENTRY gm_grouped_linear_int5_g32_min_sm80
#define GM_TILE_BYTES 1536
#define GM_OPERANDS(K)                                            \
  K(bf16, any, gm::GgufOperand<__nv_bfloat16, 5, 4, true, false>) \
  K(fp16, any, gm::GgufOperand<__half, 5, 4, true, false>)

#include "entry.h"
