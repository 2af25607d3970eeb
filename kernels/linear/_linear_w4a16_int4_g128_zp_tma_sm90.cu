// Weight-only linear at M > 16, int4 in groups of 128 with integer zero points (a scale a row comes as such
// groups too).
#include "_wgmma_weights_sm90.cuh"

#ifdef __CUDACC__
using OperandBf16 = gm::Int4Operand<__nv_bfloat16, 1, true, false>;
using OperandBf16Half = gm::Int4Operand<__nv_bfloat16, 1, true, true>;
using OperandFp16 = gm::Int4Operand<__half, 1, true, false>;
#endif

#define GM_ENTRY gm_linear_int4_g128_zp_tma_sm90
#define GM_TILE_BYTES 1072
#define GM_WIDE_TILES 0
#define GM_KERNELS(K)                             \
  K(int4_g128_zp_bf16, 2, 2, OperandBf16, GM_ALL) \
  K(int4_g128_zp_bf16_half, 2, 1, OperandBf16Half, GM_ALL) K(int4_g128_zp_fp16, 1, 0, OperandFp16, GM_ALL)
#include "_linear_frag16_tma_entry_sm90.h"
