// Rows of x to int8, in the instructions of Turing.
#define GM_ENTRY gm_quantize_int8_sm75
#include "sm75/maximum.cuh"

#include "quantize_int8.h"
