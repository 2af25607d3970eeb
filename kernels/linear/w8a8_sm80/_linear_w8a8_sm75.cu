// Linear over int8 weights and int8 activations by mma.sync of Turing.
#define GM_ENTRY gm_w8a8_linear_int8_sm75
#define GM_NAME w8a8_turing
#define GM_TYPE Int8OfTuring
#define GM_BLOCKS false
#define GM_SHAPES(K)  \
  K(16, 4, 128, 2, 1) \
  K(32, 4, 64, 2, 3)  \
  K(64, 4, 64, 2, 2)  \
  K(64, 8, 64, 2, 1)
#include "int8_sm75.cuh"

#include "entry.h"
