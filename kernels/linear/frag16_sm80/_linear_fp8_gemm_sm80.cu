// Linear over FP8 (E4M3) under a scale of the tensor, of a row or of a 128 x 128 block by mma.sync, any M.
#define GM_ENTRY gm_linear_fp8_gemm_sm80
#define GM_TILE_BYTES 2112
#define GM_OPERANDS(K)                        \
  K(bf16, any, gm::Fp8Operand<__nv_bfloat16>) \
  K(fp16, any, gm::Fp8Operand<__half>)

#include "gemm_entry.h"
