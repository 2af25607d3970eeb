// Products of experts of NVFP4 codes.
#define GM_ENTRY gm_grouped_nvfp4_sm120f
#define GM_FORMAT gm::Nvfp4
#define GM_SHAPES(K) K(16, 4, 4, 2) K(32, 4, 4, 2) K(64, 4, 3, 2) K(128, 8, 3, 1)

#include "entry.h"
