// Linear over int6 in groups of 16 under 16-bit scales, by mma.sync, any M.
#define GM_ENTRY gm_linear_int6_g16_gemm_sm80
#define GM_TILE_BYTES 1792
#define GM_OPERANDS(K)                                             \
  K(bf16, any, gm::GgufOperand<__nv_bfloat16, 6, 8, false, false>) \
  K(fp16, any, gm::GgufOperand<__half, 6, 8, false, false>)

#include "gemm_entry.h"
