// Linear over Q6_K: int6 in groups of 16 under products as scales, by mma.sync, any M.
#define GM_ENTRY gm_linear_int6_g16_k_gemm_sm80
#define GM_TILE_BYTES 1696
#define GM_OPERANDS(K)                                            \
  K(bf16, any, gm::GgufOperand<__nv_bfloat16, 6, 8, false, true>) \
  K(fp16, any, gm::GgufOperand<__half, 6, 8, false, true>)

#include "gemm_entry.h"
