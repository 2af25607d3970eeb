// RMSNorm to 8-bit codes and scales: x[r, c] / sqrt(mean_c(x[r, c]^2) + eps) * w[c] in float32, rounded to
// the dtype of x, quantized. With a residual, residual += x first, rounded to the dtype, which is normalized
// instead of x.
// gm-levels: base avx2 avx512 neon
#include "activation/_quantize_values_cpu.h"
#include "_rms_norm_row_cpu.h"
#include "calls/rms_norm_quant.h"

namespace {

template <class T>
void add_row(const T* x, T* residual, int64_t cols) {
  constexpr int64_t L = gm::kLanes;
  int64_t c = 0;
  for (; c + L <= cols; c += L) gm::store(residual + c, gm::load(x + c) + gm::load(residual + c));
  if (c < cols)
    gm::store(residual + c, gm::load(x + c, cols - c) + gm::load(residual + c, cols - c), cols - c);
}

}  // namespace

GM_CPU_CALL(gm_rms_norm_quant, RmsNormQuant)(const GmRmsNormQuantCall& call) {
  return gm::quantize_rows(call, 8192, [&](auto type, int64_t r, const auto& take) {
    using T = decltype(type);
    const T *from = static_cast<const T*>(call.x) + r * call.x_stride[0],
            *w = static_cast<const T*>(call.weight);
    if (call.residual != nullptr) {
      T* sum = static_cast<T*>(call.residual) + r * call.residual_stride[0];
      add_row(from, sum, call.n);
      from = sum;
    }
    const float scale = gm::inverse_rms(from, call.n, float(call.eps));
    const auto normed = [=](int64_t c, int64_t n) {
      if (n == gm::kLanes) return gm::rounded<T>(gm::load(from + c) * scale * gm::load(w + c));
      return gm::rounded<T>(gm::load(from + c, n) * scale * gm::load(w + c, n));
    };
    if (call.normed == nullptr) return take(normed);
    T* to = static_cast<T*>(call.normed) + r * call.normed_stride[0];
    int64_t c = 0;
    for (; c + gm::kLanes <= call.n; c += gm::kLanes) gm::store(to + c, normed(c, gm::kLanes));
    if (c < call.n) gm::store(to + c, normed(c, call.n - c), call.n - c);
    take([=](int64_t from_c, int64_t n) {
      return n == gm::kLanes ? gm::load(to + from_c) : gm::load(to + from_c, n);
    });
  });
}
