// Linear over Q5_0: int5 in groups of 32, by mma.sync, any M.
#define GM_ENTRY gm_linear_int5_g32_gemm_sm80
#define GM_TILE_BYTES 1408
#define GM_OPERANDS(K)                                             \
  K(bf16, any, gm::GgufOperand<__nv_bfloat16, 5, 4, false, false>) \
  K(fp16, any, gm::GgufOperand<__half, 5, 4, false, false>)

#include "gemm_entry.h"
