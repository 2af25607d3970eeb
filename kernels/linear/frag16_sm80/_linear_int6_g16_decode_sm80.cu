// Linear over int6 in groups of 16 under 16-bit scales, by mma.sync, M <= 16.
#define GM_ENTRY gm_linear_int6_g16_decode_sm80
#define GM_TILE_BYTES 1792
#define GM_WORDS 20
#define GM_MORE 20
#define GM_DECODER(T) gm::GgufSums<T, 6, 8, false, false>

#include "decode_entry.h"
