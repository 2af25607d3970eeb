// Products of experts over dense bf16 weights.
#define GM_ENTRY gm_grouped_dense_bf16_sm90
#define GM_NAME(rest) experts_bf16_##rest
#define GM_TYPE __nv_bfloat16
#define GM_BF16 1
#include "entry.h"
