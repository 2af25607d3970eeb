// Linear over int8 in groups of 128 or a row by mma.sync, M <= 16.
#define GM_ENTRY gm_linear_int8_decode_sm80
#define GM_TILE_BYTES 2080
#define GM_WORDS 17
#define GM_DECODER(T) gm::Int8Tile<T, 1, gm::kScaleEither>

#include "decode_entry.h"
