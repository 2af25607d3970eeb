// Steps of MoE that its entries share: counting sort, gather, weighted sum.
#pragma once
#include "gm_cpu.h"

namespace {
namespace moe {

// Stable counting sort; ids outside [0, experts) come last and have inverse -1. offsets: [experts + 1].
inline void sort_by_expert(const int32_t* ids, int32_t* offsets, int32_t* permutation, int32_t* inverse,
                           int64_t entries, int64_t experts) {
  for (int64_t e = 0; e <= experts; ++e) offsets[e] = 0;
  const auto here = [=](int32_t id) { return id >= 0 && id < experts; };
  for (int64_t i = 0; i < entries; ++i)
    if (here(ids[i])) ++offsets[ids[i] + 1];
  for (int64_t e = 0; e < experts; ++e) offsets[e + 1] += offsets[e];
  int32_t rest = offsets[experts];
  // offsets[e] is the next position of e here, and is restored below.
  for (int64_t i = 0; i < entries; ++i) {
    const int32_t place = here(ids[i]) ? offsets[ids[i]]++ : rest++;
    permutation[place] = int32_t(i);
    inverse[i] = here(ids[i]) ? place : -1;
  }
  for (int64_t e = experts; e > 0; --e) offsets[e] = offsets[e - 1];
  offsets[0] = 0;
}

// out[i] = x[rows[i] / divisor], whole rows. False if an index leaves x.
template <class T>
bool gather(const T* x, int64_t x_rows, int64_t stride, const int32_t* rows, int64_t count, int64_t divisor,
            int64_t width, T* out) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t source = rows[i] / divisor;
    if (rows[i] < 0 || source >= x_rows) return false;
    std::memcpy(out + i * width, x + source * stride, sizeof(T) * size_t(width));
  }
  return true;
}

// out[token] = sum over k, in order, of weights[token, k] * y[inverse[token, k]] in float32;
// negative positions are skipped.
template <class T>
int combine(const T* y, int64_t y_rows, const int32_t* inverse, const float* weights, T* out, int64_t tokens,
            int64_t top_k, int64_t width) {
  for (int64_t i = 0; i < tokens * top_k; ++i)
    if (inverse[i] >= y_rows) return GM_E_ARG;
  return gm::parallel_for(tokens, 16384 / (width * top_k) + 1, [=](int64_t begin, int64_t end) {
    constexpr int L = gm::kLanes;
    for (int64_t t = begin; t < end; ++t)
      for (int64_t c = 0; c < width; c += L) {
        const int64_t left = width - c;
        gm::vf sum = gm::zero();
        for (int64_t k = 0; k < top_k; ++k) {
          const int64_t place = inverse[t * top_k + k];
          if (place < 0) continue;
          const T* from = y + place * width + c;
          sum = gm::fma(gm::splat(weights[t * top_k + k]), left >= L ? gm::load(from) : gm::load(from, left),
                        sum);
        }
        left >= L ? gm::store(out + t * width + c, sum) : gm::store(out + t * width + c, sum, left);
      }
  });
}

}  // namespace moe
}  // namespace
