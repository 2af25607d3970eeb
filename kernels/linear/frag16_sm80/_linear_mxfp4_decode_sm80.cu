// Linear over MXFP4 by mma.sync, M <= 16.
#define GM_ENTRY gm_linear_mxfp4_decode_sm80
#define GM_TILE_BYTES 1088
#define GM_WORDS 10
#define GM_DECODER(T) gm::Fp4Tile<T, 32>

#include "decode_entry.h"
