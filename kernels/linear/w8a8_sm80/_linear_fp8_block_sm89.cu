// Linear over e4m3 weights with scales of 128 x 128 and activations with scales of 128 columns by mma.sync.
#define GM_ENTRY gm_w8a8_linear_fp8_block_sm89
#define GM_NAME fp8_block
#define GM_TYPE E4m3<true>
#define GM_BLOCKS true
#define GM_SHAPES(K)  \
  K(16, 4, 128, 4, 2) \
  K(32, 4, 128, 4, 2) \
  K(64, 4, 64, 3, 2)  \
  K(64, 8, 64, 4, 1)
#include "fp8.cuh"

#include "entry.h"
