// Linear over Q5_0: int5 in groups of 32, by mma.sync, M <= 16.
#define GM_ENTRY gm_linear_int5_g32_decode_sm80
#define GM_TILE_BYTES 1408
#define GM_WORDS 14
#define GM_MORE 8
#define GM_DECODER(T) gm::GgufSums<T, 5, 4, false, false>

#include "decode_entry.h"
