// Linear over NVFP4 by mma.sync, any M.
#define GM_ENTRY gm_linear_nvfp4_gemm_sm80
#define GM_TILE_BYTES 1152
#define GM_OPERANDS(K)                            \
  K(bf16, any, gm::Fp4Operand<__nv_bfloat16, 16>) \
  K(fp16, any, gm::Fp4Operand<__half, 16>)

#include "gemm_entry.h"
