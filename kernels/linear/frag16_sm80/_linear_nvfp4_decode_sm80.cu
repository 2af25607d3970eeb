// Linear over NVFP4 by mma.sync, M <= 16.
#define GM_ENTRY gm_linear_nvfp4_decode_sm80
#define GM_TILE_BYTES 1152
#define GM_WORDS 12
#define GM_DECODER(T) gm::Fp4Tile<T, 16>

#include "decode_entry.h"
