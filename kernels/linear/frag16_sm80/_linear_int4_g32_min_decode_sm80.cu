// Linear over Q4_1: int4 with minimums in groups of 32 under 16-bit scales, by mma.sync, M <= 16.
#define GM_ENTRY gm_linear_int4_g32_min_decode_sm80
#define GM_TILE_BYTES 1280
#define GM_WORDS 16
#define GM_MORE 8
#define GM_DECODER(T) gm::GgufSums<T, 4, 4, true, false>

#include "decode_entry.h"
