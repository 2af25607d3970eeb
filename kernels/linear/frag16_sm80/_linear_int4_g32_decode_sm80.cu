// Linear over int4 in groups of 32 by mma.sync, M <= 16.
#define GM_ENTRY gm_linear_int4_g32_decode_sm80
#define GM_TILE_BYTES 1152
#define GM_WORDS 12
#define GM_DECODER(T) gm::Int4Sm80Tile<T, 4>

#include "decode_entry.h"
