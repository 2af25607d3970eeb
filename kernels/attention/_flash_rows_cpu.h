// Micro-kernels of _flash_cpu.h: Q K^T and P V of a few query rows and a tile of keys and values. A row's result is
// bitwise the same whatever rows it is computed with, and wherever keys and values are read from.
//
// Rows are read in pieces of kPiece elements, two vectors. A piece of bf16 is its even and its odd elements, which one
// mask and one shift widen. Queries, widened tiles and sums of values have the same order.
#pragma once
#include "gm_cpu.h"

namespace gm {
namespace {

constexpr int64_t kTile = 64;  // keys of a tile
constexpr int64_t kPiece = 2 * kLanes;

inline int64_t padded(int64_t n) { return (n + kPiece - 1) / kPiece * kPiece; }
inline float minus_infinity() { return -__builtin_inff(); }

struct Piece {
  vf a, b;
};
inline Piece operator*(Piece x, float factor) { return {x.a * factor, x.b * factor}; }

template <class T>
inline Piece load_piece(const T* p) {
  return {load(p), load(p + kLanes)};
}
inline Piece load_piece(const bf16* p) {
  vu words;
  std::memcpy(&words, p, sizeof words);
  return {(vf)(words << 16), (vf)(words & 0xffff0000u)};
}
// e4m3 codes times 2^-8, which as float16 need no multiplication.
inline Piece load_piece(const f8e4m3* p) {
#if GM_X86_AVX2
  const auto widened = [](__m256i codes) {  // 16 codes, sign-extended
    const __m256i half = _mm256_and_si256(_mm256_slli_epi16(codes, 7), _mm256_set1_epi16(int16_t(0xbfff)));
    const __m256i top = _mm256_set1_epi16(0x3f80);
    const __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(half, top), top);
    return _mm256_or_si256(half, _mm256_and_si256(nan, _mm256_set1_epi16(0x7c00)));
  };
  const auto codes = [](const f8e4m3* from) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  };
#if GM_X86_AVX512
  return {(vf)_mm512_cvtph_ps(widened(codes(p))), (vf)_mm512_cvtph_ps(widened(codes(p + 16)))};
#else
  const __m256i halves = widened(codes(p));
  return {(vf)_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
          (vf)_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
#endif
#else
  return Piece{load(p), load(p + kLanes)} * 0x1p-8f;
#endif
}
// The first and the second vector of a piece.
template <class T>
inline vf load_first(const T* p) {
  return load(p);
}
template <class T>
inline vf load_second(const T* p) {
  return load(p + kLanes);
}
inline vf load_first(const bf16* p) { return load_piece(p).a; }
inline vf load_second(const bf16* p) { return load_piece(p).b; }
inline vf load_first(const f8e4m3* p) { return load_piece(p).a; }
inline vf load_second(const f8e4m3* p) { return load_piece(p).b; }

template <class T>
inline Piece load_piece(const T* p, int64_t n) {
  T buffer[kPiece] = {};
  for (int64_t i = 0; i < n; ++i) buffer[i] = p[i];
  return load_piece(buffer);
}

template <class T>
inline void store_piece(T* p, Piece v) {
  store(p, v.a), store(p + kLanes, v.b);
}
inline void store_piece(bf16* p, Piece v) {
  const vu words = extend(narrow(v.a, bf16{})) | (extend(narrow(v.b, bf16{})) << 16);
  std::memcpy(p, &words, sizeof words);
}
template <class T>
inline void store_piece(T* p, Piece v, int64_t n) {
  T buffer[kPiece];
  store_piece(buffer, v);
  for (int64_t i = 0; i < n; ++i) p[i] = buffer[i];
}

// Horizontal sums: lane i of the result is the sum of v[i], in the order of gm::sum. By a transposing tree, with one
// blend and one shuffle per addition.
inline vf sums(vf (&v)[kLanes]) {
#if GM_X86_AVX512
#define GM_MIX(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    v[i] = GM_MIX(v[i], v[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 24, 25, 26, 27, 28, 29, 30, 31) +
           GM_MIX(v[i], v[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    v[i] = GM_MIX(v[i], v[i + 4], 0, 1, 2, 3, 20, 21, 22, 23, 8, 9, 10, 11, 28, 29, 30, 31) +
           GM_MIX(v[i], v[i + 4], 4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27);
  for (int i = 0; i < 4; i += 2)
    v[i] = GM_MIX(v[i], v[i + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
           GM_MIX(v[i], v[i + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  return GM_MIX(v[0], v[2], 0, 1, 18, 19, 4, 5, 22, 23, 8, 9, 26, 27, 12, 13, 30, 31) +
         GM_MIX(v[0], v[2], 2, 3, 16, 17, 6, 7, 20, 21, 10, 11, 24, 25, 14, 15, 28, 29);
#undef GM_MIX
#elif GM_X86_AVX2
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    v[i] = (vf)_mm256_blend_ps((__m256)v[i], (__m256)v[i + 4], 0xf0) +
           (vf)_mm256_permute2f128_ps((__m256)v[i], (__m256)v[i + 4], 0x21);
  for (int i = 0; i < 4; i += 2)
    v[i] = (vf)_mm256_unpacklo_ps((__m256)v[i], (__m256)v[i + 1]) +
           (vf)_mm256_unpackhi_ps((__m256)v[i], (__m256)v[i + 1]);
  return (vf)_mm256_blend_ps((__m256)v[0], (__m256)v[2], 0xcc) +
         (vf)_mm256_shuffle_ps((__m256)v[0], (__m256)v[2], 0x4e);
#else
  for (int i = 0; i < 4; i += 2)
    v[i] = __builtin_shufflevector(v[i], v[i + 1], 0, 4, 1, 5) +
           __builtin_shufflevector(v[i], v[i + 1], 2, 6, 3, 7);
  return __builtin_shufflevector(v[0], v[2], 0, 1, 6, 7) + __builtin_shufflevector(v[0], v[2], 2, 3, 4, 5);
#endif
}

// Keys or values of a tile and KV head: widened in a buffer of `width` floats per token, or read in place.
struct Widened {
  const float* rows;
  int64_t width;
  const float* row(int64_t i) const { return rows + i * width; }
};
template <class T>
struct InPlace {
  const T* base;
  const int64_t* offsets;
  const T* row(int64_t i) const { return base + offsets[i]; }
};

// Keys per call of dot_rows for R rows, as accumulators allow.
template <int R>
constexpr int keys_of = R == 1   ? kLanes
                        : R == 2 ? kLanes / 2
                        : R <= 4 ? kLanes / 4
                                 : 2;

// Keeps a vector in a register: GCC would load it again for each use, and become bound by loads.
inline vf pinned(vf x) {
#if GM_X86_AVX512
  __asm__("" : "+v"(x));
#elif GM_X86_AVX2
  __asm__("" : "+x"(x));
#endif
  return x;
}

inline vf pinned(const float* p) {
#if GM_X86_AVX512
  return pinned((vf)_mm512_loadu_ps(p));
#elif GM_X86_AVX2
  return pinned((vf)_mm256_loadu_ps(p));
#else
  return load(p);
#endif
}

// Scores of R query rows (dk floats apart) against keys first .. first + keys_of<R> - 1 -> p[r * kTile + first ...].
// R > 1 loads and widens each key once for R rows.
template <int R, class Keys>
inline void dot_rows(const float* q, const Keys& keys, int64_t first, int64_t dk, float* p) {
  constexpr int B = keys_of<R>;
  vf acc[R][B] = {};
  decltype(keys.row(0)) row[B];
#pragma GCC unroll 16
  for (int b = 0; b < B; ++b) row[b] = keys.row(first + b);
  for (int64_t d = 0; d < dk; d += kPiece) {
    if constexpr (R == 1) {
      const vf x = pinned(q + d), y = pinned(q + d + kLanes);
#pragma GCC unroll 16
      for (int b = 0; b < B; ++b) {
        const Piece key = load_piece(row[b] + d);
        acc[0][b] = fma(y, key.b, fma(x, key.a, acc[0][b]));
      }
    } else {
      vf key[B];
#pragma GCC unroll 16
      for (int b = 0; b < B; ++b) key[b] = pinned(load_first(row[b] + d));
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const vf x = pinned(q + r * dk + d);
#pragma GCC unroll 16
        for (int b = 0; b < B; ++b) acc[r][b] = fma(x, key[b], acc[r][b]);
      }
#pragma GCC unroll 16
      for (int b = 0; b < B; ++b) key[b] = pinned(load_second(row[b] + d));
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const vf x = pinned(q + r * dk + d + kLanes);
#pragma GCC unroll 16
        for (int b = 0; b < B; ++b) acc[r][b] = fma(x, key[b], acc[r][b]);
      }
    }
  }
#pragma GCC unroll 2
  for (int group = 0; group < R * B; group += kLanes) {
    vf lanes[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i)
      lanes[i] = group + i < R * B ? acc[(group + i) / B % R][(group + i) % B] : zero();
    float scores[kLanes];
    store(scores, sums(lanes));
    for (int r = group / B; r < R && r * B < group + kLanes; ++r)
      std::memcpy(p + r * kTile + first, scores + r * B - group, sizeof(float) * B);
  }
}

// acc[R rows][N pieces from d] = acc * alpha + p * values, over tokens from .. to - 1 in order. alpha may be null.
template <int R, int N, class Values>
inline void accumulate(float* acc, const float* alpha, const float* p, const Values& values, int64_t from,
                       int64_t to, int64_t width, int64_t d) {
  vf sum[R][2 * N];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int n = 0; n < 2 * N; ++n) {
      sum[r][n] = load(acc + r * width + d + n * kLanes);
      if (alpha) sum[r][n] *= alpha[r];
    }
  for (int64_t t = from; t < to; ++t) {
    const auto row = values.row(t) + d;
    vf value[2 * N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const Piece both = load_piece(row + n * kPiece);
      value[2 * n] = pinned(both.a), value[2 * n + 1] = pinned(both.b);
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const vf weight = pinned(splat(p[r * kTile + t]));
#pragma GCC unroll 8
      for (int n = 0; n < 2 * N; ++n) sum[r][n] = fma(weight, value[n], sum[r][n]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int n = 0; n < 2 * N; ++n) store(acc + r * width + d + n * kLanes, sum[r][n]);
}

// Pieces that accumulate() sums at once: at least four independent chains.
template <int R>
constexpr int pieces_of = R == 1   ? 4
                          : R == 2 ? 2
                                   : 1;

template <int R, class Values>
inline void accumulate_row(float* acc, const float* alpha, const float* p, const Values& values, int64_t from,
                           int64_t to, int64_t dv) {
  constexpr int N = pieces_of<R>;
  int64_t d = 0;
  for (; d + N * kPiece <= dv; d += N * kPiece) accumulate<R, N>(acc, alpha, p, values, from, to, dv, d);
  for (; d < dv; d += kPiece) accumulate<R, 1>(acc, alpha, p, values, from, to, dv, d);
}

// Calls body(rows, first row) for groups of at most kMax rows; rows is a compile-time constant.
template <int N>
struct Count {
  static constexpr int value = N;
};
template <int kMax, class Body>
inline void for_row_groups(int64_t rows, const Body& body) {
  int64_t r = 0;
  if constexpr (kMax >= 6)
    for (; r + 6 <= rows; r += 6) body(Count<6>{}, r);
  for (; r + 4 <= rows; r += 4) body(Count<4>{}, r);
  if (r + 3 <= rows) body(Count<3>{}, r), r += 3;
  if (r + 2 <= rows) body(Count<2>{}, r), r += 2;
  if (r < rows) body(Count<1>{}, r);
}

}  // namespace
}  // namespace gm
