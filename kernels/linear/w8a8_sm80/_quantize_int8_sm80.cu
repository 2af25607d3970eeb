// Rows of x to int8.
#define GM_ENTRY gm_quantize_int8_sm80
#include "quantize_int8.h"
