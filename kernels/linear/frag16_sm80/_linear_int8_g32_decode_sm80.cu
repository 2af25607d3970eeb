// Linear over int8 in groups of 32 by mma.sync, M <= 16.
#define GM_ENTRY gm_linear_int8_g32_decode_sm80
#define GM_TILE_BYTES 2176
#define GM_WORDS 20
#define GM_DECODER(T) gm::Int8Tile<T, 4, gm::kScaleEither>

#include "decode_entry.h"
