// Linear over int4 in groups of 128 or a row by mma.sync, any M.
#define GM_ENTRY gm_linear_int4_g128_gemm_sm80
#define GM_TILE_BYTES 1056
#define GM_OPERANDS(K)                                               \
  K(bf16, bf16, gm::Int4Sm80Operand<__nv_bfloat16, 1, false, false>) \
  K(bf16, fp16, gm::Int4Sm80Operand<__nv_bfloat16, 1, false, true>)  \
  K(fp16, any, gm::Int4Sm80Operand<__half, 1, false, false>)

#include "gemm_entry.h"
