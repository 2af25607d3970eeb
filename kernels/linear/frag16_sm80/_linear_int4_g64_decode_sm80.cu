// Linear over int4 in groups of 64 by mma.sync, M <= 16.
#define GM_ENTRY gm_linear_int4_g64_decode_sm80
#define GM_TILE_BYTES 1088
#define GM_WORDS 10
#define GM_DECODER(T) gm::Int4Sm80Tile<T, 2>

#include "decode_entry.h"
