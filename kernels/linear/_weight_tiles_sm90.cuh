// How a lane reads and decodes one tile of 16 rows x 128 k: a class for each kind of weight. Tiles are those of the layouts
// w4_frag16_v1, f4_frag16_v1 and w8_frag16_v1.
//
// kBytes of a tile. kGroups: groups of the tile whose sums are scaled in float32 (0: scales go into the operands, and sums are sums).
// kPlanes: operands a step of 16 k has (2: high and low nibbles of an 8-bit integer). kOffset: sums carry (offset + zero) times Σx,
// which `scaled` takes away; kStart: sums start at -(offset + 8) times Σx instead.
#pragma once
#include <type_traits>

#include "_fp4_sm90.cuh"
#include "_w4_frag16_sm90.cuh"

#ifdef __CUDACC__
namespace gm {

// CTAs a multiprocessor that a kernel is compiled for: one fewer where the tile's own state would not leave room for `ctas`.
template <typename W, int NT>
constexpr int roomy(int ctas) {
  return NT > 1 && ctas > 1 && (W::kGroups > 1 || W::kOffset || W::kBytes > 2000) ? ctas - 1 : ctas;
}

// Dtype of 16-bit scales: known at compile time (a run-time choice costs 3 % at M = 16), or by W4Params::scales_half.
enum ScaleType { kScaleBf16, kScaleFp16, kScaleEither };

template <ScaleType SC>
__device__ __forceinline__ float2 two_scales(uint32_t word, int scales_half) {
  if (SC == kScaleFp16 || (SC == kScaleEither && scales_half)) return __half22float2(reinterpret_cast<const __half2&>(word));
  return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}

template <typename T>
struct IntegerOffset;  // of two_codes
template <>
struct IntegerOffset<__nv_bfloat16> {
  static constexpr float value = 128.f;
};
template <>
struct IntegerOffset<__half> {
  static constexpr float value = 1024.f;
};

template <typename T>
__device__ __forceinline__ void int4_pairs(uint32_t word, uint32_t (&a)[4]) {
  a[0] = two_codes<T, 0>(word), a[1] = two_codes<T, 1>(word), a[2] = two_codes<T, 2>(word), a[3] = two_codes<T, 3>(word);
}

__device__ __forceinline__ uint32_t word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

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
  static constexpr int kBytes = kCodeBytes + G * kTileRows * (ZERO ? 3 : 2), kGroups = G, kPlanes = 1;
  static constexpr bool kOffset = ZERO, kStart = !ZERO;
  uint4 q[2];
  uint32_t scales[G], zeros[ZERO ? (G + 1) / 2 : 1];

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
  __device__ __forceinline__ void pairs(int step, uint32_t (&a)[1][4]) const { int4_pairs<T>(word_of(q[step >> 2], step & 3), a[0]); }
  __device__ __forceinline__ float2 scale(int group, const W4Params& p) const { return two_scales<SC>(scales[group], p.scales_half); }
  // -(offset + zero) of rows g and g + 8.
  __device__ __forceinline__ float2 offset(int group) const {
    const uint32_t word = zeros[group >> 1], at = (group & 1) * 2;
    float lo = __uint_as_float(__byte_perm(word, 0x43000000u, 0x7044 | at << 8));  // 128 + the byte
    float hi = __uint_as_float(__byte_perm(word, 0x43000000u, 0x7044 | (at + 1) << 8));
    return make_float2(128.f - IntegerOffset<T>::value - lo, 128.f - IntegerOffset<T>::value - hi);
  }
};

// int8 as two planes of nibbles: code = 16 high + low, symmetric around 128.
template <typename T, ScaleType SC>
struct Int8Tile {
  static constexpr int kBytes = 2 * kCodeBytes + kTileRows * 2, kGroups = 1, kPlanes = 2;
  static constexpr bool kOffset = true, kStart = false;
  uint4 q[4];
  uint32_t scales;

  __device__ __forceinline__ void load(const uint8_t* tile, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) q[i] = reinterpret_cast<const uint4*>(tile)[32 * i + lane];
    scales = reinterpret_cast<const uint32_t*>(tile + 2 * kCodeBytes)[lane >> 2];
  }
  __device__ __forceinline__ void pairs(int step, uint32_t (&a)[2][4]) const {
    int4_pairs<T>(word_of(q[step >> 2], step & 3), a[0]);
    int4_pairs<T>(word_of(q[2 + (step >> 2)], step & 3), a[1]);
  }
  __device__ __forceinline__ float2 scale(int, const W4Params& p) const { return two_scales<SC>(scales, p.scales_half); }
  __device__ __forceinline__ float2 offset(int) const {
    constexpr float both = -(17.f * IntegerOffset<T>::value + 128.f);
    return make_float2(both, both);
  }
};

// The two pairs of a word of w8_frag16_v1 in FP8, exactly: the layout spreads their bits for cheap placement.
template <typename T>
__device__ __forceinline__ void fp8_pairs(uint32_t w, uint32_t (&a)[2]) {
  if constexpr (std::is_same_v<T, __half>) {
    constexpr uint32_t by = 0x5C005C00u;  // 2^8
    a[0] = times_half<T, 0>((w & 0x80008000u) | ((w << 3) & 0x3F803F80u), by);
    a[1] = times_half<T, 0>(((w << 4) & 0x80008000u) | ((w << 7) & 0x07800780u) | ((w >> 1) & 0x38003800u), by);
  } else {
    constexpr uint32_t by = 0x7B807B80u;  // 2^120
    a[0] = times_half<T, 0>(w & 0x87F087F0u, by);
    a[1] = times_half<T, 0>(((w << 4) & 0x80F080F0u) | ((w >> 4) & 0x07000700u), by);
  }
}

// FP8 (E4M3) under one float32 scale a row and tile.
template <typename T>
struct Fp8Tile {
  static constexpr int kBytes = 2 * kCodeBytes + kTileRows * 4, kGroups = 1, kPlanes = 1;
  static constexpr bool kOffset = false, kStart = false;
  uint4 q[4];
  float2 scales;

  __device__ __forceinline__ void load(const uint8_t* tile, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) q[i] = reinterpret_cast<const uint4*>(tile)[32 * i + lane];
    scales = reinterpret_cast<const float2*>(tile + 2 * kCodeBytes)[lane >> 2];
  }
  __device__ __forceinline__ void pairs(int step, uint32_t (&a)[1][4]) const {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      uint32_t two[2];
      fp8_pairs<T>(word_of(q[step >> 1], (step & 1) * 2 + j), two);
      a[0][2 * j] = two[0], a[0][2 * j + 1] = two[1];
    }
  }
  __device__ __forceinline__ float2 scale(int, const W4Params&) const { return scales; }
};

// NVFP4 (BLOCK = 16) and MXFP4 (BLOCK = 32): block scales multiply the operands, exactly.
template <typename T, int BLOCK>
struct Fp4Tile {
  static constexpr int kScales = kTileK / BLOCK, kBytes = kCodeBytes + kTileRows * kScales, kGroups = 0, kPlanes = 1;
  static constexpr bool kOffset = false, kStart = false;
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
  __device__ __forceinline__ void pairs(int step, uint32_t (&a)[1][4]) const {
    const uint32_t factor = BLOCK == 16 ? nvfp4_factor<T>(scales[step >> 1], step & 1) : mxfp4_factor<T>(scales[step >> 2], step >> 1 & 1);
    uint32_t raw[4];
    fp4_pairs<T>(word_of(q[step >> 2], step & 3), raw);
    a[0][0] = times_half<T, 0>(raw[0], factor), a[0][1] = times_half<T, 1>(raw[1], factor);
    a[0][2] = times_half<T, 0>(raw[2], factor), a[0][3] = times_half<T, 1>(raw[3], factor);
  }
};

}  // namespace gm
#endif
