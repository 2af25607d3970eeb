#define GM_ENTRY gm_linear_w8a8_int8_sm90
#define GM_NAME linear_w8a8_int8
#define GM_TYPE Int8
#define GM_BLOCKS false
#include "entry.h"
