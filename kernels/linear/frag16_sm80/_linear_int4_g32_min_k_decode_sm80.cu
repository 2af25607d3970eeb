// Linear over Q4_K: int4 with minimums in groups of 32 under products as scales, by mma.sync, M <= 16.
#define GM_ENTRY gm_linear_int4_g32_min_k_decode_sm80
#define GM_TILE_BYTES 1216
#define GM_WORDS 14
#define GM_MORE 8
#define GM_DECODER(T) gm::GgufSums<T, 4, 4, true, true>

#include "decode_entry.h"
