// RMSNorm: out[r, c] = x[r, c] / sqrt(mean_c(x[r, c]^2) + eps) * w[c], summed and scaled in float32, rounded
// once. Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
#include "gm_cpu.h"

namespace {

template <class T>
void rms_norm_row(const T* x, const T* w, T* out, int64_t cols, float eps) {
  constexpr int L = gm::kLanes;
  gm::vf s0 = gm::zero(), s1 = gm::zero();  // two chains hide the latency of fma
  int64_t c = 0;
  for (; c + 2 * L <= cols; c += 2 * L) {
    const gm::vf a = gm::load(x + c), b = gm::load(x + c + L);
    s0 = gm::fma(a, a, s0);
    s1 = gm::fma(b, b, s1);
  }
  for (; c < cols; c += L) {
    const int64_t n = cols - c;
    const gm::vf a = n >= L ? gm::load(x + c) : gm::load(x + c, n);
    s0 = gm::fma(a, a, s0);
  }
  const float scale = 1.0f / __builtin_sqrtf(gm::sum(s0 + s1) / float(cols) + eps);
  for (c = 0; c + L <= cols; c += L) gm::store(out + c, gm::load(x + c) * scale * gm::load(w + c));
  if (c < cols) gm::store(out + c, gm::load(x + c, cols - c) * scale * gm::load(w + c, cols - c), cols - c);
}

}  // namespace

// x [rows, cols] and out [rows, cols] with the given row strides and unit column stride, w [cols], all of one
// dtype. out may be x.
GM_KERNEL(gm_rms_norm)(const void* x, int64_t x_row_stride, const void* w, void* out, int64_t out_row_stride,
                       int64_t rows, int64_t cols, float eps, int dtype) {
  if (rows < 0 || cols < 1) return GM_E_SHAPE;
  GM_DISPATCH_FLOAT(dtype, T, {
    const int64_t grain = 16384 / cols + 1;  // about 16k elements a task
    return gm::parallel_for(rows, grain, [=](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r)
        rms_norm_row(static_cast<const T*>(x) + r * x_row_stride, static_cast<const T*>(w),
                     static_cast<T*>(out) + r * out_row_stride, cols, eps);
    });
  })
}
