// Linear over int4 with zero points in groups of 32 by mma.sync, any M.
#define GM_ENTRY gm_linear_int4_g32_zp_gemm_sm80
#define GM_TILE_BYTES 1216
#define GM_OPERANDS(K)                                              \
  K(bf16, bf16, gm::Int4Sm80Operand<__nv_bfloat16, 4, true, false>) \
  K(bf16, fp16, gm::Int4Sm80Operand<__nv_bfloat16, 4, true, true>)  \
  K(fp16, any, gm::Int4Sm80Operand<__half, 4, true, false>)

#include "gemm_entry.h"
