// Rows of x to e4m3 for Hopper, with one scale for all of them.
#define GM_ENTRY gm_quantize_fp8_sm90
#define GM_OVERLAP
#include "quantize_fp8.h"
