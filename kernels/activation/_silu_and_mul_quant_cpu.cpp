// SwiGLU's gate to 8-bit codes and scales:
// silu(x[r, c]) * x[r, cols + c] in float32, rounded to the dtype of x, quantized.
// gm-levels: base avx2 avx512 neon
#include "_quantize_values_cpu.h"

namespace {

template <class T, class Code>
int silu_and_mul_quant(const T* x, int64_t x_row_stride, Code* codes, int64_t code_row_stride, float* scales,
                       int64_t rows, int64_t cols, const gm::RowFormat& format) {
  const int64_t groups = gm::scales_of_row(format, cols);
  return gm::parallel_for(rows, 2048 / cols + 1, [=](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T *gate = x + r * x_row_stride, *up = gate + cols;
      const auto values = [=](int64_t c, int64_t n) {
        const bool whole = n == gm::kLanes;
        const gm::vf g = whole ? gm::load(gate + c) : gm::load(gate + c, n);
        return gm::rounded<T>(gm::silu(g) * (whole ? gm::load(up + c) : gm::load(up + c, n)));
      };
      gm::quantize_values(values, cols, codes + r * code_row_stride, scales + r * groups, format);
    }
  });
}

}  // namespace

// x [rows, 2 * cols] of `dtype`, gate first, and codes [rows, cols], e4m3 or, with top 127, int8, with the
// given row strides; scales [rows, groups], or [1] if least is 0, which are then read.
GM_KERNEL(gm_silu_and_mul_quant)(const void* x, int64_t x_row_stride, void* codes, int64_t code_row_stride,
                                 float* scales, int64_t rows, int64_t cols, int64_t group, float least,
                                 float top, int dtype) {
  if (rows < 0 || cols < 1 || group < 0) return GM_E_SHAPE;
  const gm::RowFormat format{group, least, top};
  GM_DISPATCH_FLOAT(dtype, T, {
    const T* from = static_cast<const T*>(x);
    if (top == 127.0f)
      return silu_and_mul_quant(from, x_row_stride, static_cast<int8_t*>(codes), code_row_stride, scales,
                                rows, cols, format);
    return silu_and_mul_quant(from, x_row_stride, static_cast<gm::f8e4m3*>(codes), code_row_stride, scales,
                              rows, cols, format);
  })
}
