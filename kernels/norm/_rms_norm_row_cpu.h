// RMSNorm of one row: out[c] = x[c] / sqrt(mean(x^2) + eps) * w[c], summed and scaled in float32, rounded
// once. Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
#pragma once
#include "gm_cpu.h"

namespace gm {
namespace {

// 1 / sqrt(mean(x^2) + eps)
template <class T>
inline float inverse_rms(const T* x, int64_t cols, float eps) {
  constexpr int L = kLanes;
  vf s0 = zero(), s1 = zero();  // two chains hide the latency of fma
  int64_t c = 0;
  for (; c + 2 * L <= cols; c += 2 * L) {
    const vf a = load(x + c), b = load(x + c + L);
    s0 = fma(a, a, s0);
    s1 = fma(b, b, s1);
  }
  for (; c < cols; c += L) {
    const int64_t n = cols - c;
    const vf a = n >= L ? load(x + c) : load(x + c, n);
    s0 = fma(a, a, s0);
  }
  return 1.0f / __builtin_sqrtf(sum(s0 + s1) / float(cols) + eps);
}

template <class T>
void rms_norm_row(const T* x, const T* w, T* out, int64_t cols, float eps) {
  constexpr int L = kLanes;
  const float scale = inverse_rms(x, cols, eps);
  int64_t c = 0;
  for (; c + L <= cols; c += L) store(out + c, load(x + c) * scale * load(w + c));
  if (c < cols) store(out + c, load(x + c, cols - c) * scale * load(w + c, cols - c), cols - c);
}

}  // namespace
}  // namespace gm
