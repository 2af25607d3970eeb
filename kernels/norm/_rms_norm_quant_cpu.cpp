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

template <class T, class Code>
int rms_norm_quant(const GmRmsNormQuantCall& call, const gm::RowFormat& format) {
  const int64_t cols = call.n, groups = gm::scales_of_row(format, cols);
  return gm::parallel_for(call.m, 8192 / cols + 1, [&](int64_t begin, int64_t end) {
    const T* w = static_cast<const T*>(call.weight);
    for (int64_t r = begin; r < end; ++r) {
      const T* from = static_cast<const T*>(call.x) + r * call.x_stride[0];
      if (call.residual != nullptr) {
        T* sum = static_cast<T*>(call.residual) + r * call.residual_stride[0];
        add_row(from, sum, cols);
        from = sum;
      }
      const float scale = gm::inverse_rms(from, cols, float(call.eps));
      const auto values = [=](int64_t c, int64_t n) {
        if (n == gm::kLanes) return gm::rounded<T>(gm::load(from + c) * scale * gm::load(w + c));
        return gm::rounded<T>(gm::load(from + c, n) * scale * gm::load(w + c, n));
      };
      gm::quantize_values(values, cols, static_cast<Code*>(call.codes) + r * call.codes_stride[0],
                          static_cast<float*>(call.scales) + r * groups, format);
    }
  });
}

}  // namespace

// The scale of the tensor is read, others are written.
GM_CPU_CALL(gm_rms_norm_quant, RmsNormQuant)(const GmRmsNormQuantCall& call) {
  if (call.m < 0 || call.n < 1) return GM_E_SHAPE;
  const gm::RowFormat format = gm::row_format(call.format);
  GM_DISPATCH_FLOAT(call.x_type, T, {
    return call.q_type == GM_I8 ? rms_norm_quant<T, int8_t>(call, format)
                                : rms_norm_quant<T, gm::f8e4m3>(call, format);
  })
}
