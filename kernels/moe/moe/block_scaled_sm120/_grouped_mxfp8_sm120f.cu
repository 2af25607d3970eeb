// Products of experts of MXFP8 codes.
#define GM_ENTRY gm_grouped_mxfp8_sm120f
#define GM_FORMAT gm::Mxfp8
#define GM_SHAPES(K) K(16, 4, 4, 1) K(32, 4, 3, 1) K(64, 8, 2, 1) K(128, 4, 2, 1)

#include "entry.h"
