// Grouped linear over MXFP4.
#define GM_ENTRY gm_grouped_linear_mxfp4_sm90
#define GM_NAME(rest) grouped_mxfp4_##rest
#define GM_TILE_BYTES 1088
#define GM_DECODERS                                   \
  using Decoder_bf16 = Fp4Operand<__nv_bfloat16, 32>; \
  using Decoder_fp16 = Fp4Operand<__half, 32>;
#define GM_VARIANTS(K) K(bf16, 2, 0) K(fp16, 1, 0)

#include "entry.h"
