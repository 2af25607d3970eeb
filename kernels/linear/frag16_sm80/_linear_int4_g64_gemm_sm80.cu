// Linear over int4 in groups of 64 by mma.sync, any M.
#define GM_ENTRY gm_linear_int4_g64_gemm_sm80
#define GM_TILE_BYTES 1088
#define GM_OPERANDS(K)                                               \
  K(bf16, bf16, gm::Int4Sm80Operand<__nv_bfloat16, 2, false, false>) \
  K(bf16, fp16, gm::Int4Sm80Operand<__nv_bfloat16, 2, false, true>)  \
  K(fp16, any, gm::Int4Sm80Operand<__half, 2, false, false>)

#include "gemm_entry.h"
