// Linear over int4 with zero points in groups of 32 by mma.sync, M <= 16.
#define GM_ENTRY gm_linear_int4_g32_zp_decode_sm80
#define GM_TILE_BYTES 1216
#define GM_WORDS 14
#define GM_DECODER(T) gm::Int4ZeroTile<T, 4>

#include "decode_entry.h"
