// Grouped linear over int4 in groups of 128, or under one scale per row.
#define GM_ENTRY gm_grouped_linear_int4_g128_sm90
#define GM_NAME(rest) grouped_int4_g128_##rest
#define GM_TILE_BYTES 1056
#define GM_DECODERS                                                      \
  using Decoder_bf16_bf16 = Int4Operand<__nv_bfloat16, 1, false, false>; \
  using Decoder_bf16_fp16 = Int4Operand<__nv_bfloat16, 1, false, true>;  \
  using Decoder_fp16 = Int4Operand<__half, 1, false, false>;
#define GM_VARIANTS(K) K(bf16_bf16, 2, 2) K(bf16_fp16, 2, 1) K(fp16, 1, 0)

#include "entry.h"
