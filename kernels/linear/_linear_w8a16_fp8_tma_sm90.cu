// Weight-only linear at M > 16, FP8 (E4M3) under a float32 scale for each row and 128 columns.
#include "_wgmma_weights_sm90.cuh"

#ifdef __CUDACC__
using OperandBf16 = gm::Fp8Operand<__nv_bfloat16>;
using OperandFp16 = gm::Fp8Operand<__half>;
#endif

#define GM_ENTRY gm_linear_fp8_tma_sm90
#define GM_TILE_BYTES 2112
#define GM_WIDE_TILES 1
#define GM_KERNELS(K) K(fp8_bf16, 2, 0, OperandBf16, GM_ALL) K(fp8_fp16, 1, 0, OperandFp16, GM_ALL)
#include "_linear_frag16_tma_entry_sm90.h"
