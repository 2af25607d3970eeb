// Linear over FP8 (E4M3) under a scale of the tensor, of a row or of a 128 x 128 block by mma.sync, M <= 16.
#define GM_ENTRY gm_linear_fp8_decode_sm80
#define GM_TILE_BYTES 2112
#define GM_WORDS 18
#define GM_DECODER(T) gm::Fp8Tile<T>

#include "decode_entry.h"
