// Linear over Q4_1: int4 with minimums in groups of 32 under 16-bit scales, by mma.sync, any M.
#define GM_ENTRY gm_linear_int4_g32_min_gemm_sm80
#define GM_TILE_BYTES 1280
#define GM_OPERANDS(K)                                            \
  K(bf16, any, gm::GgufOperand<__nv_bfloat16, 4, 4, true, false>) \
  K(fp16, any, gm::GgufOperand<__half, 4, 4, true, false>)

#include "gemm_entry.h"
