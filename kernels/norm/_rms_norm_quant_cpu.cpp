// RMSNorm to 8-bit codes and scales: x[r, c] / sqrt(mean_c(x[r, c]^2) + eps) * w[c] in float32, rounded to
// the dtype of x, quantized. With a residual, residual += x first, rounded to the dtype, which is normalized
// instead of x.
// gm-levels: base avx2 avx512 neon
#include "activation/_quantize_values_cpu.h"
#include "_rms_norm_row_cpu.h"

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
int rms_norm_quant(const T* x, int64_t x_row_stride, T* residual, int64_t residual_row_stride, const T* w,
                   Code* codes, int64_t code_row_stride, float* scales, int64_t rows, int64_t cols, float eps,
                   const gm::RowFormat& format) {
  const int64_t groups = gm::scales_of_row(format, cols);
  return gm::parallel_for(rows, 8192 / cols + 1, [=](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T* from = x + r * x_row_stride;
      if (residual != nullptr) {
        T* sum = residual + r * residual_row_stride;
        add_row(from, sum, cols);
        from = sum;
      }
      const float scale = gm::inverse_rms(from, cols, eps);
      const auto values = [=](int64_t c, int64_t n) {
        if (n == gm::kLanes) return gm::rounded<T>(gm::load(from + c) * scale * gm::load(w + c));
        return gm::rounded<T>(gm::load(from + c, n) * scale * gm::load(w + c, n));
      };
      gm::quantize_values(values, cols, codes + r * code_row_stride, scales + r * groups, format);
    }
  });
}

}  // namespace

// x and residual [rows, cols] (null: none; written) and w [cols] of `dtype`,
// codes [rows, cols], e4m3 or, with top 127, int8, with the given row strides;
// scales [rows, groups], or [1] if least is 0, which are then read.
GM_KERNEL(gm_rms_norm_quant)(const void* x, int64_t x_row_stride, void* residual, int64_t residual_row_stride,
                             const void* w, void* codes, int64_t code_row_stride, float* scales, int64_t rows,
                             int64_t cols, float eps, int64_t group, float least, float top, int dtype) {
  if (rows < 0 || cols < 1 || group < 0) return GM_E_SHAPE;
  const gm::RowFormat format{group, least, top};
  GM_DISPATCH_FLOAT(dtype, T, {
    const T *from = static_cast<const T*>(x), *weight = static_cast<const T*>(w);
    T* sum = static_cast<T*>(residual);
    if (top == 127.0f)
      return rms_norm_quant(from, x_row_stride, sum, residual_row_stride, weight, static_cast<int8_t*>(codes),
                            code_row_stride, scales, rows, cols, eps, format);
    return rms_norm_quant(from, x_row_stride, sum, residual_row_stride, weight,
                          static_cast<gm::f8e4m3*>(codes), code_row_stride, scales, rows, cols, eps, format);
  })
}
