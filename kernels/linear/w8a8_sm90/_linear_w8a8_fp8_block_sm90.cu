#define GM_ENTRY gm_linear_w8a8_fp8_block_sm90
#define GM_NAME linear_w8a8_fp8_block
#define GM_TYPE E4m3
#define GM_BLOCKS true
#include "entry.h"
