// The decoders of frag16 tiles (../frag16_sm90/decoders_mma.cuh), as far as sm_80 has their instructions.
#pragma once
#include "linear/frag16_sm90/decoders_mma.cuh"

#ifdef __CUDACC__
namespace gm {

// int4 in G groups per tile with zero points. Before sm_90 a pair of bf16 has no multiplication, only a multiply-add.
template <typename T, int G>
struct Int4ZeroTile : Int4Tile<T, G, true, kScaleEither> {
  __device__ __forceinline__ void pairs(int step, uint32_t (&a)[4]) {
    using Factors = IntegerFactors<T>;
    if (step * G % 8 == 0) {
      const uint32_t zeros = this->zeros[step * G / 16], minus_zero = 0x80008000u;
      const int at = step * G / 8 % 2 * 2;
#pragma unroll
      for (int row = 0; row < 2; ++row)
        this->codes.minus[row] =
            pair_fma(__byte_perm(zeros, 0, 0x4040 + (at + row) * 0x0101), Factors::kMinus, minus_zero, T());
    }
    this->codes.decode(word_of(this->q[step >> 2], step & 3), a);
  }
};

template <typename T, int G>
using Int4Sm80Tile = Int4Tile<T, G, false, kScaleEither>;

}  // namespace gm
#endif
