// How a lane reads and decodes one tile of 16 rows x 128 k for mma.sync: a class per kind of weight, named by
// instances.json. Tiles are those of the layouts w4_frag16_v1, f4_frag16_v1 and w8_frag16_v1.
//
//   kBytes              of a tile
//   kGroups             groups of the tile whose sums are scaled in float32; 0: scales go into the operands
//   kFactor             factor of the final sums
//   kZero               whether there are zero points, which need registers
//   load(tile, lane)    loads a lane's words of the tile from shared memory
//   pairs(step, a)      decodes the A operand of 16 k; called in the order of steps
//   scale(group, half)  of rows g and g + 8; half: 16-bit scales are fp16, not bf16
//   any()               a value that depends on every word loaded
//
// The low eight bits of a bf16 are an integer x 2^-133, subnormal or not, those of an fp16 an integer x 2^-24. So codes
// at bits 0 and 4 of a half, and bytes at bit 0, are valid floats without conversion: one multiply-add by a power of
// two scales them and subtracts the zero point.
#pragma once
#include <type_traits>

#include "fp4.cuh"
#include "tile.h"

#ifdef __CUDACC__
namespace gm {

// Dtype of 16-bit scales: known at compile time (a run-time choice costs 3 % at M = 16), or by
// the argument scales_half of `scale`.
enum ScaleType { kScaleBf16, kScaleFp16, kScaleEither };

template <ScaleType SC>
__device__ __forceinline__ float2 two_scales(uint32_t word, int scales_half) {
  if (SC == kScaleFp16 || (SC == kScaleEither && scales_half))
    return __half22float2(reinterpret_cast<const __half2&>(word));
  return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}

// a * b + c of pairs, rounded once.
__device__ __forceinline__ uint32_t pair_fma(uint32_t a, uint32_t b, uint32_t c, __nv_bfloat16) {
  uint32_t out;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}
__device__ __forceinline__ uint32_t pair_fma(uint32_t a, uint32_t b, uint32_t c, __half) {
  uint32_t out;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}
__device__ __forceinline__ uint32_t pair_mul(uint32_t a, uint32_t b, __nv_bfloat16) {
  uint32_t out;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
__device__ __forceinline__ uint32_t pair_mul(uint32_t a, uint32_t b, __half) {
  uint32_t out;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
// Factors, as pairs, that convert integers in place to floats, exactly: the result is the integer / kFactor.
template <typename T>
struct IntegerFactors;
template <>
struct IntegerFactors<__nv_bfloat16> {
  static constexpr float kFactor = 64.f;
  static constexpr uint32_t kAt0 = 0x7F007F00u,
                            kAt4 = 0x7D007D00u;    // 2^127, 2^123: of integers at bit 0 and at bit 4
  static constexpr uint32_t kMinus = 0xFF00FF00u;  // -2^127: of the subtrahend, at bit 0
  static constexpr uint32_t kMinus8 = 0xBE00BE00u, kMinus128 = 0xC000C000u;
};
template <>
struct IntegerFactors<__half> {
  static constexpr float kFactor = 512.f;
  static constexpr uint32_t kAt0 = 0x78007800u, kAt4 = 0x68006800u;  // 2^15, 2^11
  static constexpr uint32_t kMinus = 0xF800F800u;                    // -2^15
  static constexpr uint32_t kMinus8 = 0xA400A400u, kMinus128 = 0xB400B400u;
};

// Codes of 4 bits less their zero points (8 without), / kFactor. A word has four pairs: of row g at bits 0
// and 8 of its halves, of row g + 8 at bits 4 and 12. zeros: bytes `at` and `at` + 1 are the zero points of
// the two rows.
template <typename T, bool ZERO>
struct Int4Pairs {
  using Factors = IntegerFactors<T>;
  uint32_t minus[2] = {Factors::kMinus8, Factors::kMinus8};
  __device__ __forceinline__ void set(uint32_t zeros, int at) {
    if constexpr (ZERO) {
      minus[0] = pair_mul(__byte_perm(zeros, 0, 0x4040 + at * 0x0101), Factors::kMinus, T());
      minus[1] = pair_mul(__byte_perm(zeros, 0, 0x4141 + at * 0x0101), Factors::kMinus, T());
    }
  }
  __device__ __forceinline__ void decode(uint32_t word, uint32_t (&a)[4]) const {
    const uint32_t next = word >> 8;
    a[0] = pair_fma(word & 0x000f000fu, Factors::kAt0, minus[0], T()),
    a[1] = pair_fma(word & 0x00f000f0u, Factors::kAt4, minus[1], T());
    a[2] = pair_fma(next & 0x000f000fu, Factors::kAt0, minus[0], T()),
    a[3] = pair_fma(next & 0x00f000f0u, Factors::kAt4, minus[1], T());
  }
};

// Four pairs of bytes, at bits 0 and 16, of the words that hold their low and their high nibbles.
__device__ __forceinline__ void int8_bytes(uint32_t low, uint32_t high, uint32_t (&pairs)[4]) {
  const uint32_t even = (low & 0x0f0f0f0fu) | (high << 4 & 0xf0f0f0f0u),
                 odd = (low >> 4 & 0x0f0f0f0fu) | (high & 0xf0f0f0f0u);
  const uint32_t bytes[4] = {even, odd, even >> 8, odd >> 8};
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = bytes[i] & 0x00ff00ffu;
}

// Integers of 8 bits less 128, / kFactor.
template <typename T>
__device__ __forceinline__ void int8_pairs(uint32_t low, uint32_t high, uint32_t (&a)[4]) {
  int8_bytes(low, high, a);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    a[i] = pair_fma(a[i], IntegerFactors<T>::kAt0, IntegerFactors<T>::kMinus128, T());
}

__device__ __forceinline__ uint32_t word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

template <int WORDS>
__device__ __forceinline__ void load_words(uint32_t (&to)[WORDS], const uint8_t* from) {
  static_assert(WORDS == 1 || WORDS == 2 || WORDS == 4);
  if constexpr (WORDS == 1) {
    to[0] = *reinterpret_cast<const uint32_t*>(from);
  } else if constexpr (WORDS == 2) {
    const uint2 v = *reinterpret_cast<const uint2*>(from);
    to[0] = v.x, to[1] = v.y;
  } else {
    const uint4 v = *reinterpret_cast<const uint4*>(from);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  }
}

// int4 in G groups a tile, with zero points (ZERO) or symmetric.
template <typename T, int G, bool ZERO, ScaleType SC>
struct Int4Tile {
  static constexpr int kBytes = kCodeBytes + G * kTileRows * (ZERO ? 3 : 2), kGroups = G;
  static constexpr float kFactor = IntegerFactors<T>::kFactor;
  static constexpr bool kZero = ZERO;
  uint4 q[2];
  uint32_t scales[G], zeros[ZERO ? (G + 1) / 2 : 1];
  Int4Pairs<T, ZERO> codes;

  __device__ __forceinline__ void load(const uint8_t* tile, int lane) {
    const int g = lane >> 2;
    q[0] = reinterpret_cast<const uint4*>(tile)[lane], q[1] = reinterpret_cast<const uint4*>(tile)[32 + lane];
    load_words(scales, tile + kCodeBytes + 4 * G * g);
    if constexpr (ZERO) {
      const uint8_t* from = tile + kCodeBytes + 32 * G + 2 * G * g;
      if constexpr (G == 1)
        zeros[0] = *reinterpret_cast<const uint16_t*>(from);
      else
        load_words(zeros, from);
    }
  }
  __device__ __forceinline__ void pairs(int step, uint32_t (&a)[4]) {
    if (ZERO && step * G % 8 == 0) codes.set(zeros[step * G / 16], step * G / 8 % 2 * 2);
    codes.decode(word_of(q[step >> 2], step & 3), a);
  }
  __device__ __forceinline__ float2 scale(int group, int scales_half) const {
    return two_scales<SC>(scales[group], scales_half);
  }
  __device__ __forceinline__ uint32_t any() const {
    return q[0].x | q[1].x | scales[0] | (ZERO ? zeros[0] : 0);
  }
};

// int8 as two planes of nibbles: code = 16 high + low, symmetric around 128, in G groups a tile.
template <typename T, int G, ScaleType SC>
struct Int8Tile {
  static constexpr int kBytes = 2 * kCodeBytes + G * kTileRows * 2, kGroups = G;
  static constexpr float kFactor = IntegerFactors<T>::kFactor;
  static constexpr bool kZero = false;
  uint4 q[4];
  uint32_t scales[G];

  __device__ __forceinline__ void load(const uint8_t* tile, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) q[i] = reinterpret_cast<const uint4*>(tile)[32 * i + lane];
    load_words(scales, tile + 2 * kCodeBytes + 4 * G * (lane >> 2));
  }
  __device__ __forceinline__ void pairs(int step, uint32_t (&a)[4]) const {
    int8_pairs<T>(word_of(q[step >> 2], step & 3), word_of(q[2 + (step >> 2)], step & 3), a);
  }
  __device__ __forceinline__ float2 scale(int group, int scales_half) const {
    return two_scales<SC>(scales[group], scales_half);
  }
  __device__ __forceinline__ uint32_t any() const { return q[0].x | q[1].x | q[2].x | q[3].x | scales[0]; }
};

// The two pairs of a word of w8_frag16_v1 in FP8, exactly: the layout spreads their bits for cheap placement.
template <typename T>
__device__ __forceinline__ void fp8_pairs(uint32_t w, uint32_t (&a)[2]) {
  if constexpr (std::is_same_v<T, __half>) {
    constexpr uint32_t by = 0x5C005C00u;  // 2^8
    a[0] = times_half<T, 0>((w & 0x80008000u) | ((w << 3) & 0x3F803F80u), by);
    a[1] =
        times_half<T, 0>(((w << 4) & 0x80008000u) | ((w << 7) & 0x07800780u) | ((w >> 1) & 0x38003800u), by);
  } else {
    constexpr uint32_t by = 0x7B807B80u;  // 2^120
    a[0] = times_half<T, 0>(w & 0x87F087F0u, by);
    a[1] = times_half<T, 0>(((w << 4) & 0x80F080F0u) | ((w >> 4) & 0x07000700u), by);
  }
}

// FP8 (E4M3) under one float32 scale per row and tile.
template <typename T>
struct Fp8Tile {
  static constexpr int kBytes = 2 * kCodeBytes + kTileRows * 4, kGroups = 1;
  static constexpr float kFactor = 1.f;
  static constexpr bool kZero = false;
  uint4 q[4];
  float2 scales;

  __device__ __forceinline__ void load(const uint8_t* tile, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) q[i] = reinterpret_cast<const uint4*>(tile)[32 * i + lane];
    scales = reinterpret_cast<const float2*>(tile + 2 * kCodeBytes)[lane >> 2];
  }
  __device__ __forceinline__ void pairs(int step, uint32_t (&a)[4]) const {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      uint32_t two[2];
      fp8_pairs<T>(word_of(q[step >> 1], (step & 1) * 2 + j), two);
      a[2 * j] = two[0], a[2 * j + 1] = two[1];
    }
  }
  __device__ __forceinline__ float2 scale(int, int) const { return scales; }
  __device__ __forceinline__ uint32_t any() const {
    return q[0].x | q[1].x | q[2].x | q[3].x | __float_as_uint(scales.x);
  }
};

// NVFP4 (BLOCK = 16) and MXFP4 (BLOCK = 32): block scales multiply the operands, exactly.
template <typename T, int BLOCK>
struct Fp4Tile {
  static constexpr int kScales = kTileK / BLOCK, kBytes = kCodeBytes + kTileRows * kScales, kGroups = 0;
  static constexpr float kFactor = 1.f;
  static constexpr bool kZero = false;
  uint4 q[2];
  uint32_t scales[kScales / 2];

  __device__ __forceinline__ void load(const uint8_t* tile, int lane) {
    q[0] = reinterpret_cast<const uint4*>(tile)[lane], q[1] = reinterpret_cast<const uint4*>(tile)[32 + lane];
    load_words(scales, tile + kCodeBytes + 2 * kScales * (lane >> 2));
    if constexpr (BLOCK == 32) {
#pragma unroll
      for (uint32_t& word : scales) word = mxfp4_bytes<T>(word);
    }
  }
  __device__ __forceinline__ void pairs(int step, uint32_t (&a)[4]) const {
    const uint32_t factor = BLOCK == 16 ? nvfp4_factor<T>(scales[step >> 1], step & 1)
                                        : mxfp4_factor<T>(scales[step >> 2], step >> 1 & 1);
    uint32_t raw[4];
    fp4_pairs<T>(word_of(q[step >> 2], step & 3), raw);
    a[0] = times_half<T, 0>(raw[0], factor), a[1] = times_half<T, 1>(raw[1], factor);
    a[2] = times_half<T, 0>(raw[2], factor), a[3] = times_half<T, 1>(raw[3], factor);
  }
  __device__ __forceinline__ uint32_t any() const { return q[0].x | q[1].x | scales[0]; }
};

}  // namespace gm
#endif
