#define GM_ENTRY gm_grouped_w8a8_fp8_sm90
#define GM_NAME experts_w8a8_fp8
#define GM_TYPE E4m3
#define GM_BLOCKS false
#include "entry.h"
