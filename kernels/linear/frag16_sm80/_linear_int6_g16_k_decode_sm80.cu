// Linear over Q6_K: int6 in groups of 16 under products as scales, by mma.sync, M <= 16.
#define GM_ENTRY gm_linear_int6_g16_k_decode_sm80
#define GM_TILE_BYTES 1696
#define GM_WORDS 17
#define GM_MORE 8
#define GM_DECODER(T) gm::GgufSums<T, 6, 8, false, true>

#include "decode_entry.h"
