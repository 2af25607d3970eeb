// Grouped linear over int4 in groups of 32.
#define GM_ENTRY gm_grouped_linear_int4_g32_sm80
#define GM_TILE_BYTES 1152
#define GM_OPERANDS(K)                                               \
  K(bf16, bf16, gm::Int4Sm80Operand<__nv_bfloat16, 4, false, false>) \
  K(bf16, fp16, gm::Int4Sm80Operand<__nv_bfloat16, 4, false, true>)  \
  K(fp16, any, gm::Int4Sm80Operand<__half, 4, false, false>)

#include "entry.h"
