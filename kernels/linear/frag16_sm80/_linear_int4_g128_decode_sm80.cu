// Linear over int4 in groups of 128 or a row by mma.sync, M <= 16.
#define GM_ENTRY gm_linear_int4_g128_decode_sm80
#define GM_TILE_BYTES 1056
#define GM_WORDS 9
#define GM_DECODER(T) gm::Int4Sm80Tile<T, 1>

#include "decode_entry.h"
