// The arithmetic of _flash_cpu.h on a tile of keys and values: scores of a few query rows, and weighted sums
// of values. A row's result is the same bit for bit whatever rows it is computed with, and wherever the keys
// and values are read from.
#pragma once
#include "gm_cpu.h"

namespace gm {
namespace {

constexpr int64_t kTile = 32;  // keys of a tile

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t padded(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }
inline float minus_infinity() { return -__builtin_inff(); }

// Neighbouring lanes of a, then of b, added: log2(kLanes) rounds of it over kLanes vectors give each vector's
// sum in its own lane.
inline vf fold(vf a, vf b) {
#if GM_X86_AVX512
  const vf x = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const vf y = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#elif GM_X86_AVX2
  const vf x = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14);
  const vf y = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#else
  const vf x = __builtin_shufflevector(a, b, 0, 2, 4, 6);
  const vf y = __builtin_shufflevector(a, b, 1, 3, 5, 7);
#endif
  return x + y;
}
inline vf sums(vf (&v)[kLanes]) {
#pragma GCC unroll 8
  for (int n = kLanes / 2; n > 0; n /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < n; ++i) v[i] = fold(v[2 * i], v[2 * i + 1]);
  return v[0];
}

// Scores of R query rows (dk floats apart) against B keys, R * B = kLanes, row by row in the lanes. R > 1
// widens each key once for R rows.
template <int R, class Keys>
inline vf dot_rows(const float* q, const Keys& keys, int64_t first, int64_t dk) {
  constexpr int B = kLanes / R;
  vf acc[kLanes] = {};
  for (int64_t d = 0; d < dk; d += kLanes) {
    vf key[B];
#pragma GCC unroll 16
    for (int b = 0; b < B; ++b) key[b] = keys.at(first + b, d);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const vf x = load(q + r * dk + d);
#pragma GCC unroll 16
      for (int b = 0; b < B; ++b) acc[r * B + b] = fma(x, key[b], acc[r * B + b]);
    }
  }
  return sums(acc);
}

// Rows of a tile: widened in a buffer, padded to whole vectors by zeros, or in place in the cache.
struct Widened {
  const float* rows;
  int64_t width;
  vf at(int64_t i, int64_t d) const { return load(rows + i * width + d); }
  void fetch(int64_t, int64_t, int64_t) const {}
};
template <class T>
struct InPlace {
  const T *rows[kTile], *next[kTile];  // and those of the tile that follows
  vf at(int64_t i, int64_t d) const { return load(rows[i] + d); }
  // Elements [d, d + n) of the following tile's row i. Prefetched in small parts: a core stalls if too many
  // lines are in flight.
  void fetch(int64_t i, int64_t d, int64_t n) const {
    for (int64_t end = d + n; d < end; d += int64_t(64 / sizeof(T))) __builtin_prefetch(next[i] + d);
  }
};

// acc[R rows][N vectors] = acc * alpha + p * values, tokens in order.
template <int R, int N, bool Ahead, class Values>
inline void accumulate(float* acc, const float* alpha, const float* p, const Values& values, int64_t tokens,
                       int64_t width, int64_t d) {
  vf sum[R][N];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sum[r][n] = load(acc + r * width + d + n * kLanes) * alpha[r];
  for (int64_t t = 0; t < tokens; ++t) {
    vf value[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) value[n] = values.at(t, d + n * kLanes);
    if constexpr (Ahead) values.fetch(t, d, N * kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const vf weight = splat(p[r * kTile + t]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sum[r][n] = fma(weight, value[n], sum[r][n]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store(acc + r * width + d + n * kLanes, sum[r][n]);
}

template <int R, bool Ahead, class Values>
inline void accumulate_rows(float* acc, const float* alpha, const float* p, const Values& values,
                            int64_t tokens, int64_t width) {
  constexpr int N = kLanes == 16 ? 4 : 2;
  int64_t d = 0;
  for (; d + N * kLanes <= width; d += N * kLanes)
    accumulate<R, N, Ahead>(acc, alpha, p, values, tokens, width, d);
  for (; d < width; d += kLanes) accumulate<R, 1, Ahead>(acc, alpha, p, values, tokens, width, d);
}

}  // namespace
}  // namespace gm
