// Grouped linear over MXFP4.
#define GM_ENTRY gm_grouped_linear_mxfp4_sm80
#define GM_TILE_BYTES 1088
#define GM_OPERANDS(K)                            \
  K(bf16, any, gm::Fp4Operand<__nv_bfloat16, 32>) \
  K(fp16, any, gm::Fp4Operand<__half, 32>)

#include "entry.h"
