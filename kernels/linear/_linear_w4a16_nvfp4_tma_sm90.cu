// Weight-only linear at M > 16, NVFP4.
#include "_wgmma_weights_sm90.cuh"

#ifdef __CUDACC__
using OperandBf16 = gm::Fp4Operand<__nv_bfloat16, 16>;
using OperandFp16 = gm::Fp4Operand<__half, 16>;
#endif

#define GM_ENTRY gm_linear_nvfp4_tma_sm90
#define GM_TILE_BYTES 1152
#define GM_WIDE_TILES 0
#define GM_KERNELS(K) K(nvfp4_bf16, 2, 0, OperandBf16, GM_ALL) K(nvfp4_fp16, 1, 0, OperandFp16, GM_ALL)
#include "_linear_frag16_tma_entry_sm90.h"
