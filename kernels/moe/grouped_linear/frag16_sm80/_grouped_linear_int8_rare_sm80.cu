// Grouped linear over int8 in groups of 128 or a row.
#define GM_ENTRY gm_grouped_linear_int8_sm80
#define GM_TILE_BYTES 2080
#define GM_OPERANDS(K)                                        \
  K(bf16, bf16, gm::Int8Sm80Operand<__nv_bfloat16, 1, true>)  \
  K(bf16, fp16, gm::Int8Sm80Operand<__nv_bfloat16, 1, false>) \
  K(fp16, bf16, gm::Int8Sm80Operand<__half, 1, false>)        \
  K(fp16, fp16, gm::Int8Sm80Operand<__half, 1, true>)

#include "entry.h"
