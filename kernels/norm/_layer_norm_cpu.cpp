// LayerNorm: out[r, c] = (s[r, c] - mean_c(s[r, c])) / sqrt(var_c(s[r, c]) + eps) * weight[c] + bias[c] in float32, rounded
// once, where s is x or, with a residual, the stored sum residual += x. Ba, Kiros, Hinton, "Layer Normalization" (2016).
// gm-levels: base avx2 avx512 neon
#include "calls/layer_norm.h"
#include "gm_cpu.h"

namespace {

// residual += x, rounded to the dtype.
template <class T>
void add_row(const T* x, T* residual, int64_t cols) {
  constexpr int L = gm::kLanes;
  int64_t c = 0;
  for (; c + L <= cols; c += L) gm::store(residual + c, gm::load(x + c) + gm::load(residual + c));
  if (c < cols)
    gm::store(residual + c, gm::load(x + c, cols - c) + gm::load(residual + c, cols - c), cols - c);
}

template <class T>
float mean_of(const T* x, int64_t cols) {
  constexpr int L = gm::kLanes;
  gm::vf s0 = gm::zero(), s1 = gm::zero();  // two chains hide the latency of the addition
  int64_t c = 0;
  for (; c + 2 * L <= cols; c += 2 * L) s0 = s0 + gm::load(x + c), s1 = s1 + gm::load(x + c + L);
  for (; c < cols; c += L) s0 = s0 + (c + L <= cols ? gm::load(x + c) : gm::load(x + c, cols - c));
  return gm::sum(s0 + s1) / float(cols);
}

struct Moments {
  float mean, variance;
};

// The mean of the squares of x - mean, not the difference of two sums, which would cancel. `mean` may be off by the rounding
// of a long sum; the mean of x - mean corrects both.
template <class T>
Moments moments_of(const T* x, float mean, int64_t cols) {
  constexpr int L = gm::kLanes;
  gm::vf s0 = gm::zero(), s1 = gm::zero(), d0 = gm::zero(), d1 = gm::zero();
  int64_t c = 0;
  for (; c + 2 * L <= cols; c += 2 * L) {
    const gm::vf a = gm::load(x + c) - mean, b = gm::load(x + c + L) - mean;
    s0 = gm::fma(a, a, s0), d0 = d0 + a;
    s1 = gm::fma(b, b, s1), d1 = d1 + b;
  }
  for (; c + L <= cols; c += L) {
    const gm::vf a = gm::load(x + c) - mean;
    s0 = gm::fma(a, a, s0), d0 = d0 + a;
  }
  float squares = gm::sum(s0 + s1), rest = gm::sum(d0 + d1);
  for (; c < cols; ++c) {
    const float a = gm::to_float(x[c]) - mean;
    squares += a * a, rest += a;
  }
  rest /= float(cols);
  return {mean + rest, squares / float(cols) - rest * rest};
}

template <class T>
void layer_norm_row(const T* x, T* residual, const T* weight, const T* bias, T* out, int64_t cols,
                    float eps) {
  constexpr int L = gm::kLanes;
  if (residual) add_row(x, residual, cols), x = residual;
  const auto [mean, variance] = moments_of(x, mean_of(x, cols), cols);
  const float scale = 1.0f / __builtin_sqrtf(variance + eps);
  int64_t c = 0;
  for (; c + L <= cols; c += L) {
    const gm::vf y = (gm::load(x + c) - mean) * scale;
    gm::store(out + c,
              bias ? gm::fma(y, gm::load(weight + c), gm::load(bias + c)) : y * gm::load(weight + c));
  }
  if (c < cols) {
    const int64_t n = cols - c;
    const gm::vf y = (gm::load(x + c, n) - mean) * scale;
    gm::store(out + c,
              bias ? gm::fma(y, gm::load(weight + c, n), gm::load(bias + c, n)) : y * gm::load(weight + c, n),
              n);
  }
}

}  // namespace

// out may be x or the residual. Rows of residual and of out must not overlap.
GM_CPU_CALL(gm_layer_norm, LayerNorm)(const GmLayerNormCall& call) {
  if (call.m < 0 || call.n < 1) return GM_E_SHAPE;
  GM_DISPATCH_FLOAT(call.x_type, T, {
    const int64_t grain = 16384 / call.n + 1;  // about 16k elements a task
    return gm::parallel_for(call.m, grain, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r)
        layer_norm_row(static_cast<const T*>(call.x) + r * call.x_stride[0],
                       call.residual ? static_cast<T*>(call.residual) + r * call.residual_stride[0] : nullptr,
                       static_cast<const T*>(call.weight), static_cast<const T*>(call.bias),
                       static_cast<T*>(call.out) + r * call.out_stride[0], call.n, float(call.eps));
    });
  })
}
