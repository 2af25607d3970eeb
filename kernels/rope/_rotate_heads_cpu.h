// Rotary position embedding of heads in place: each pair (a, b) becomes (a cos - b sin, b cos + a sin), in
// float32, rounded once. Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021).
#pragma once
#include "gm_cpu.h"

namespace gm {
namespace {

// Pairs (x[i], x[half + i]): GPT-NeoX.
template <class T>
void rotate_halves(T* x, const float* cos, const float* sin, int64_t half) {
  constexpr int L = kLanes;
  int64_t i = 0;
  for (; i + L <= half; i += L) {
    const vf a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
    store(x + i, a * c - b * s);
    store(x + half + i, b * c + a * s);
  }
  if (i < half) {
    const int64_t n = half - i;
    const vf a = load(x + i, n), b = load(x + half + i, n), c = load(cos + i, n), s = load(sin + i, n);
    store(x + i, a * c - b * s, n);
    store(x + half + i, b * c + a * s, n);
  }
}

// Pairs (x[2i], x[2i + 1]): GPT-J.
template <class T>
void rotate_neighbours(T* x, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float a = to_float(x[2 * i]), b = to_float(x[2 * i + 1]);
    x[2 * i] = from_float<T>(a * cos[i] - b * sin[i]);
    x[2 * i + 1] = from_float<T>(b * cos[i] + a * sin[i]);
  }
}

// Rotates the heads of a token. row: rot / 2 cosines, then rot / 2 sines; null for a position outside the table, which
// gives NaN.
template <class T>
void rotate_heads(T* token, int64_t head_stride, int64_t heads, const float* row, int64_t rot,
                  bool interleaved) {
  const int64_t half = rot / 2;
  for (int64_t h = 0; h < heads; ++h) {
    T* x = token + h * head_stride;
    if (row == nullptr) {
      for (int64_t i = 0; i < rot; ++i) x[i] = from_float<T>(__builtin_nanf(""));
    } else if (interleaved) {
      rotate_neighbours(x, row, row + half, half);
    } else {
      rotate_halves(x, row, row + half, half);
    }
  }
}

}  // namespace
}  // namespace gm
