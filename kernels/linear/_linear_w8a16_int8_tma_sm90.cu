// Weight-only linear at M > 16, int8 in groups of 128 (a scale a row comes as such groups too).
#include "_wgmma_weights_sm90.cuh"

#ifdef __CUDACC__
using OperandBf16 = gm::Int8Operand<__nv_bfloat16, true>;
using OperandBf16Half = gm::Int8Operand<__nv_bfloat16, false>;
using OperandFp16 = gm::Int8Operand<__half, true>;
using OperandFp16Wide = gm::Int8Operand<__half, false>;
#endif

#define GM_ENTRY gm_linear_int8_tma_sm90
#define GM_TILE_BYTES 2080
#define GM_WIDE_TILES 1
#define GM_KERNELS(K)                                                                      \
  K(int8_bf16, 2, 2, OperandBf16, GM_ALL)                                                  \
  K(int8_bf16_half, 2, 1, OperandBf16Half, GM_ALL) K(int8_fp16, 1, 1, OperandFp16, GM_ALL) \
      K(int8_fp16_wide, 1, 2, OperandFp16Wide, GM_ALL)
#include "_linear_frag16_tma_entry_sm90.h"
