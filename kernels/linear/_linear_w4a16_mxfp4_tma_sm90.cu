// Weight-only linear at M > 16, MXFP4.
#include "_wgmma_weights_sm90.cuh"

#ifdef __CUDACC__
using OperandBf16 = gm::Fp4Operand<__nv_bfloat16, 32>;
using OperandFp16 = gm::Fp4Operand<__half, 32>;
#endif

#define GM_ENTRY gm_linear_mxfp4_tma_sm90
#define GM_TILE_BYTES 1088
#define GM_WIDE_TILES 0
#define GM_KERNELS(K) K(mxfp4_bf16, 2, 0, OperandBf16, GM_ALL) K(mxfp4_fp16, 1, 0, OperandFp16, GM_ALL)
#include "_linear_frag16_tma_entry_sm90.h"
