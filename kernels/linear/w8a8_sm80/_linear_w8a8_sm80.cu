// Linear over int8 weights and int8 activations by mma.sync.
#define GM_ENTRY gm_w8a8_linear_int8_sm80
#define GM_NAME w8a8
#define GM_TYPE Int8
#define GM_BLOCKS false
#define GM_SHAPES(K)  \
  K(16, 4, 128, 4, 2) \
  K(32, 4, 128, 4, 2) \
  K(64, 8, 64, 4, 2)  \
  K(128, 4, 64, 4, 2) \
  K(128, 8, 64, 4, 1)
#include "int8.cuh"

#include "entry.h"
