// How a lane reads and decodes a tile of gguf_frag16_v1 for mma.sync: the interface of ../frag16_sm90/decoders_mma.cuh,
// and for weights with minimums
//
//   offset(group, half)   of rows g and g + 8: what is subtracted from every weight of the group
//
// Scales and offsets are applied to sums in float32, so that those of K-quants, products of a float16 and a byte, are
// exact.
#pragma once
#include "linear/frag16_sm90/decoders_mma.cuh"

#ifdef __CUDACC__
namespace gm {

// Codes of BITS bits of a step, in the bytes of two words: of row g in `even`, of row g + 8 in `odd`. Byte 2 * odd column
// + column half of each. high: the word of the plane of upper bits that has the step.
template <int BITS>
__device__ __forceinline__ void gguf_bytes(uint32_t low, uint32_t high, int step, uint32_t& even,
                                           uint32_t& odd) {
  even = low & 0x0f0f0f0fu, odd = low >> 4 & 0x0f0f0f0fu;
  if constexpr (BITS > 4) {
    constexpr uint32_t kMask = BITS == 5 ? 0x10101010u : 0x30303030u;
    const int at = BITS == 5 ? step % 4 * 2 : step % 2 * 4,
              next = at + BITS - 4;  // of the bits of `even`, of `odd`
    even |= (at < 4 ? high << (4 - at) : high >> (at - 4)) & kMask;
    odd |= (next < 4 ? high << (4 - next) : high >> (next - 4)) & kMask;
  }
}

// Codes of BITS bits, less their middle unless ZERO_IS_0, / kFactor.
template <typename T, int BITS, bool ZERO_IS_0>
__device__ __forceinline__ void gguf_pairs(uint32_t low, uint32_t high, int step, uint32_t (&a)[4]) {
  using Factors = IntegerFactors<T>;
  constexpr bool kHalf = std::is_same_v<T, __half>;
  constexpr uint32_t kMinus = ZERO_IS_0
                                  ? 0x80008000u  // -0: before sm_90 a pair of bf16 has no multiplication
                              : BITS == 5 ? (kHalf ? 0xA800A800u : 0xBE80BE80u)   // -16 / kFactor
                                          : (kHalf ? 0xAC00AC00u : 0xBF00BF00u);  // -32 / kFactor
  static_assert(ZERO_IS_0 || BITS > 4);
  if constexpr (BITS == 4) {
    const uint32_t next = low >> 8;
    a[0] = pair_fma(low & 0x000f000fu, Factors::kAt0, kMinus, T());
    a[1] = pair_fma(low & 0x00f000f0u, Factors::kAt4, kMinus, T());
    a[2] = pair_fma(next & 0x000f000fu, Factors::kAt0, kMinus, T());
    a[3] = pair_fma(next & 0x00f000f0u, Factors::kAt4, kMinus, T());
  } else {
    uint32_t even, odd;
    gguf_bytes<BITS>(low, high, step, even, odd);
    const uint32_t bytes[4] = {even, odd, even >> 8, odd >> 8};
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = pair_fma(bytes[i] & 0x00ff00ffu, Factors::kAt0, kMinus, T());
  }
}

// Products of d, a pair of float16, and of the bytes of a group in a word, signed ones plus 128: of rows g and g + 8.
template <bool UNSIGNED>
__device__ __forceinline__ float2 factored_scales(uint32_t d, uint32_t word, int group) {
  constexpr float kBias = 8388608.f + (UNSIGNED ? 0.f : 128.f);  // 2^23, whose lowest byte is theirs
  const float2 by = __half22float2(reinterpret_cast<const __half2&>(d));
  const int at = 0x7540 + group % 2 * 2;
  return make_float2(by.x * (__uint_as_float(__byte_perm(word, 0x4B000000u, at)) - kBias),
                     by.y * (__uint_as_float(__byte_perm(word, 0x4B000000u, at + 1)) - kBias));
}

// BITS: 4, 5 or 6.  G: groups of a tile.  MINIMUMS: codes are not signed, and offsets follow the scales.
// FACTORED: scales are products.
template <int BITS, int G, bool MINIMUMS, bool FACTORED>
struct GgufTile {
  static constexpr int kKinds = MINIMUMS ? 2 : 1, kPlane = (BITS - 4) * 256, kScales = kCodeBytes + kPlane,
                       kBytes = kScales + kTileRows * kKinds * (FACTORED ? 2 + G : 2 * G);
};

template <typename T, int BITS, int G, bool MINIMUMS, bool FACTORED>
struct GgufSums : GgufTile<BITS, G, MINIMUMS, FACTORED> {
  using Tile = GgufTile<BITS, G, MINIMUMS, FACTORED>;
  static constexpr int kGroups = G, kHigh = BITS == 4 ? 1 : (BITS - 4) * 2;
  static constexpr float kFactor = IntegerFactors<T>::kFactor;
  uint4 q[2];
  uint32_t high[kHigh];
  // FACTORED: d, then dmin, of two rows; bytes. Otherwise the scales of G groups, then the offsets.
  uint32_t d[Tile::kKinds], scales[FACTORED ? 4 : Tile::kKinds * G];

  __device__ __forceinline__ void load(const uint8_t* tile, int lane) {
    const int g = lane >> 2;
    q[0] = reinterpret_cast<const uint4*>(tile)[lane], q[1] = reinterpret_cast<const uint4*>(tile)[32 + lane];
    if constexpr (BITS > 4) load_words(high, tile + kCodeBytes + lane * kHigh * 4);
    const uint8_t* from = tile + Tile::kScales;
    if constexpr (FACTORED) {
      load_words(d, from + g * Tile::kKinds * 4);
      load_words(scales, from + Tile::kKinds * 32 + g * 16);
    } else {
#pragma unroll
      for (int i = 0; i < Tile::kKinds * G / 4; ++i) {
        const int kind = i * 4 / G, first = i * 4 % G;
        const uint4 v = *reinterpret_cast<const uint4*>(from + kind * G * 32 + g * G * 4 + first * 4);
        scales[4 * i] = v.x, scales[4 * i + 1] = v.y, scales[4 * i + 2] = v.z, scales[4 * i + 3] = v.w;
      }
    }
  }
  __device__ __forceinline__ void pairs(int step, uint32_t (&a)[4]) const {
    gguf_pairs<T, BITS, MINIMUMS>(word_of(q[step >> 2], step & 3), high[step * kHigh / 8], step, a);
  }
  __device__ __forceinline__ float2 scale(int group, int scales_half) const {
    return one(group, 0, scales_half);
  }
  __device__ __forceinline__ float2 offset(int group, int scales_half) const
    requires(MINIMUMS)
  {
    return one(group, 1, scales_half);
  }

 private:
  __device__ __forceinline__ float2 one(int group, int kind, int scales_half) const {
    if constexpr (FACTORED) {
      return factored_scales<MINIMUMS>(d[kind], scales[group / 2 * Tile::kKinds + kind], group);
    } else {
      return two_scales<kScaleEither>(scales[kind * G + group], scales_half);
    }
  }
};

}  // namespace gm
#endif
