// Products of experts over dense fp16 weights.
#define GM_ENTRY gm_grouped_dense_fp16_sm90
#define GM_NAME(rest) experts_fp16_##rest
#define GM_TYPE __half
#define GM_BF16 0
#include "entry.h"
