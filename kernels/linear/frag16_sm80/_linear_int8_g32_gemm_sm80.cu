// Linear over int8 in groups of 32 by mma.sync, any M.
#define GM_ENTRY gm_linear_int8_g32_gemm_sm80
#define GM_TILE_BYTES 2176
#define GM_OPERANDS(K)                                        \
  K(bf16, bf16, gm::Int8Sm80Operand<__nv_bfloat16, 4, true>)  \
  K(bf16, fp16, gm::Int8Sm80Operand<__nv_bfloat16, 4, false>) \
  K(fp16, bf16, gm::Int8Sm80Operand<__half, 4, false>)        \
  K(fp16, fp16, gm::Int8Sm80Operand<__half, 4, true>)

#include "gemm_entry.h"
