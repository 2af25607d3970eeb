// Weight-only linear at M > 16, int8 in groups of 128 (a scale a row comes as such groups too).
#include "_wgmma_weights_sm90.cuh"

#ifdef __CUDACC__
using OperandBf16 = gm::Int8Operand<__nv_bfloat16>;
using OperandFp16 = gm::Int8Operand<__half>;
#endif

#define GM_ENTRY gm_linear_int8_tma_sm90
#define GM_TILE_BYTES 2080
#define GM_WIDE_TILES 1
#define GM_KERNELS(K) K(int8_bf16, 2, 0, OperandBf16, GM_FEW) K(int8_fp16, 1, 0, OperandFp16, GM_FEW)
#include "_linear_frag16_tma_entry_sm90.h"
