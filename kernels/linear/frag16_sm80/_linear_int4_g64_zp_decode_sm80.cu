// Linear over int4 with zero points in groups of 64 by mma.sync, M <= 16.
#define GM_ENTRY gm_linear_int4_g64_zp_decode_sm80
#define GM_TILE_BYTES 1120
#define GM_WORDS 11
#define GM_DECODER(T) gm::Int4ZeroTile<T, 2>

#include "decode_entry.h"
