// In the place of kernels/linear/frag16_sm90/decoders_mma.cuh: the names that decoders.cuh and decoders_gguf.cuh of frag16_sm80 need to be read.
// A schedule on a CPU multiplies plain weights; the decoders have tests of their own.
#pragma once
#include <type_traits>

#include "linear/frag16_sm90/tile.h"

namespace gm {

enum ScaleType { kScaleBf16, kScaleFp16, kScaleEither };
template <typename T>
struct IntegerFactors;
template <typename T, int G, bool ZERO, ScaleType SC>
struct Int4Tile;
template <ScaleType SC>
float2 two_scales(uint32_t word, int scales_half);
template <int WORDS>
void load_words(uint32_t (&to)[WORDS], const uint8_t* from);
uint32_t word_of(const uint4& v, int i);

}  // namespace gm
