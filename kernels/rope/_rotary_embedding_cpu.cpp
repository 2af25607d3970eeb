// Rotary position embedding in place: each pair (a, b) of a head becomes (a cos - b sin, b cos + a sin), in
// float32, rounded once. Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021).
#include "gm_cpu.h"

namespace {

// Pairs (x[i], x[half + i]): GPT-NeoX.
template <class T>
void rotate_halves(T* x, const float* cos, const float* sin, int64_t half) {
  constexpr int L = gm::kLanes;
  int64_t i = 0;
  for (; i + L <= half; i += L) {
    const gm::vf a = gm::load(x + i), b = gm::load(x + half + i), c = gm::load(cos + i),
                 s = gm::load(sin + i);
    gm::store(x + i, a * c - b * s);
    gm::store(x + half + i, b * c + a * s);
  }
  if (i < half) {
    const int64_t n = half - i;
    const gm::vf a = gm::load(x + i, n), b = gm::load(x + half + i, n), c = gm::load(cos + i, n),
                 s = gm::load(sin + i, n);
    gm::store(x + i, a * c - b * s, n);
    gm::store(x + half + i, b * c + a * s, n);
  }
}

// Pairs (x[2i], x[2i + 1]): GPT-J.
template <class T>
void rotate_neighbours(T* x, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float a = gm::to_float(x[2 * i]), b = gm::to_float(x[2 * i + 1]);
    x[2 * i] = gm::from_float<T>(a * cos[i] - b * sin[i]);
    x[2 * i + 1] = gm::from_float<T>(b * cos[i] + a * sin[i]);
  }
}

template <class T>
void rotate_token(T* token, int64_t head_stride, int64_t heads, const float* row, int64_t rot,
                  bool interleaved) {
  const int64_t half = rot / 2;
  for (int64_t h = 0; h < heads; ++h) {
    T* x = token + h * head_stride;
    if (row == nullptr) {  // a position outside the table
      for (int64_t i = 0; i < rot; ++i) x[i] = gm::from_float<T>(__builtin_nanf(""));
    } else if (interleaved) {
      rotate_neighbours(x, row, row + half, half);
    } else {
      rotate_halves(x, row, row + half, half);
    }
  }
}

}  // namespace

// q [tokens, q_heads, >= rot] and k likewise (null: none), strides in elements, heads contiguous; positions
// [tokens]; cos_sin [rows, rot]: rot/2 cosines, then rot/2 sines. interleaved: neighbours are pairs, else
// halves.
GM_KERNEL(gm_rotary_embedding)(void* q, int64_t q_token_stride, int64_t q_head_stride, int64_t q_heads,
                               void* k, int64_t k_token_stride, int64_t k_head_stride, int64_t k_heads,
                               const int64_t* positions, const float* cos_sin, int64_t rows, int64_t tokens,
                               int64_t rot, int interleaved, int dtype) {
  if (tokens < 0 || rot < 2 || rot % 2 != 0 || q_heads < 0 || k_heads < 0 ||
      (tokens > 0 && k == nullptr && k_heads != 0))
    return GM_E_SHAPE;
  GM_DISPATCH_FLOAT(dtype, T, {
    const int64_t grain = 8192 / ((q_heads + k_heads) * rot + 1) + 1;
    return gm::parallel_for(tokens, grain, [=](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const int64_t p = positions[t];
        const float* row = p >= 0 && p < rows ? cos_sin + p * rot : nullptr;
        rotate_token(static_cast<T*>(q) + t * q_token_stride, q_head_stride, q_heads, row, rot,
                     interleaved != 0);
        if (k_heads)
          rotate_token(static_cast<T*>(k) + t * k_token_stride, k_head_stride, k_heads, row, rot,
                       interleaved != 0);
      }
    });
  })
}
