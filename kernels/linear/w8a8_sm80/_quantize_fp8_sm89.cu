// Rows of x to e4m3.
#define GM_ENTRY gm_quantize_fp8_sm89
#include "quantize_fp8.h"
