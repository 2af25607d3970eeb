// Grouped linear over int4 with zero points in groups of 64.
#define GM_ENTRY gm_grouped_linear_int4_g64_zp_sm80
#define GM_TILE_BYTES 1120
#define GM_OPERANDS(K)                                              \
  K(bf16, bf16, gm::Int4Sm80Operand<__nv_bfloat16, 2, true, false>) \
  K(bf16, fp16, gm::Int4Sm80Operand<__nv_bfloat16, 2, true, true>)  \
  K(fp16, any, gm::Int4Sm80Operand<__half, 2, true, false>)

#include "entry.h"
