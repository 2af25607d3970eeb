// SwiGLU's gate: out[r, c] = silu(x[r, c]) * x[r, cols + c], in float32, rounded once.
// Shazeer, "GLU Variants Improve Transformer" (2020).
#include "gm_cpu.h"

namespace {

template <class T>
void silu_and_mul_row(const T* gate, const T* up, T* out, int64_t cols) {
  constexpr int L = gm::kLanes;
  int64_t c = 0;
  for (; c + L <= cols; c += L) gm::store(out + c, gm::silu(gm::load(gate + c)) * gm::load(up + c));
  if (c < cols) {
    const int64_t n = cols - c;
    gm::store(out + c, gm::silu(gm::load(gate + c, n)) * gm::load(up + c, n), n);
  }
}

}  // namespace

// x [rows, 2 * cols], gate first, and out [rows, cols], with the given row strides and unit column stride, of
// one dtype. out may be the gate half of x.
GM_KERNEL(gm_silu_and_mul)(const void* x, int64_t x_row_stride, void* out, int64_t out_row_stride,
                           int64_t rows, int64_t cols, int dtype) {
  if (rows < 0 || cols < 1) return GM_E_SHAPE;
  GM_DISPATCH_FLOAT(dtype, T, {
    const int64_t grain = 4096 / cols + 1;
    return gm::parallel_for(rows, grain, [=](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T* row = static_cast<const T*>(x) + r * x_row_stride;
        silu_and_mul_row(row, row + cols, static_cast<T*>(out) + r * out_row_stride, cols);
      }
    });
  })
}
