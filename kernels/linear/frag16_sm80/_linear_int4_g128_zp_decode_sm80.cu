// Linear over int4 with zero points in groups of 128 or a row by mma.sync, M <= 16.
#define GM_ENTRY gm_linear_int4_g128_zp_decode_sm80
#define GM_TILE_BYTES 1072
#define GM_WORDS 10
#define GM_DECODER(T) gm::Int4ZeroTile<T, 1>

#include "decode_entry.h"
