// Grouped linear over NVFP4.
#define GM_ENTRY gm_grouped_linear_nvfp4_sm80
#define GM_TILE_BYTES 1152
#define GM_OPERANDS(K)                            \
  K(bf16, any, gm::Fp4Operand<__nv_bfloat16, 16>) \
  K(fp16, any, gm::Fp4Operand<__half, 16>)

#include "entry.h"
