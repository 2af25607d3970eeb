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

template <class T, class W>
void rms_norm_row(const T* x, const W* w, T* out, int64_t cols, float eps) {
  constexpr int L = kLanes;
  const float scale = inverse_rms(x, cols, eps);
  int64_t c = 0;
  for (; c + L <= cols; c += L) store(out + c, load(x + c) * scale * load(w + c));
  if (c < cols) store(out + c, load(x + c, cols - c) * scale * load(w + c, cols - c), cols - c);
}

// Calls row(number, weight) for the rows of a call of a norm, whose weight is in x's dtype T, or float32.
template <class T, class Call, class Row>
int each_row(const Call& call, const Row& row) {
  const auto run = [&](auto weight) {
    const int64_t grain = 16384 / call.n + 1;  // about 16k elements a task
    return parallel_for(call.m, grain, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) row(r, weight);
    });
  };
  if (call.w_type == GM_F32) return run(static_cast<const float*>(call.weight));
  return call.w_type == call.x_type ? run(static_cast<const T*>(call.weight)) : int(GM_E_DTYPE);
}

}  // namespace
}  // namespace gm
