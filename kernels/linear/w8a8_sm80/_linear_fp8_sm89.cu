// Linear over e4m3 weights and activations with a scale for each row by mma.sync.
#define GM_ENTRY gm_w8a8_linear_fp8_sm89
#define GM_NAME fp8
#define GM_TYPE E4m3<false>
#define GM_BLOCKS false
#define GM_SHAPES(K)  \
  K(16, 4, 128, 4, 2) \
  K(32, 4, 128, 4, 2) \
  K(64, 4, 64, 4, 2)  \
  K(64, 8, 64, 4, 1)
#include "fp8.cuh"

#include "entry.h"
