// Linear over Q5_1: int5 with minimums in groups of 32 under 16-bit scales, by mma.sync, M <= 16.
#define GM_ENTRY gm_linear_int5_g32_min_decode_sm80
#define GM_TILE_BYTES 1536
#define GM_WORDS 18
#define GM_MORE 20
#define GM_DECODER(T) gm::GgufSums<T, 5, 4, true, false>

#include "decode_entry.h"
