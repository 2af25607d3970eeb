// RMSNorm: out[r, c] = x[r, c] / sqrt(mean_c(x[r, c]^2) + eps) * w[c], summed and scaled in float32, rounded
// once. Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
#include "_rms_norm_row_cpu.h"

// x [rows, cols] and out [rows, cols] with the given row strides and unit column stride, w [cols], all of one
// dtype. out may be x.
GM_KERNEL(gm_rms_norm)(const void* x, int64_t x_row_stride, const void* w, void* out, int64_t out_row_stride,
                       int64_t rows, int64_t cols, float eps, int dtype) {
  if (rows < 0 || cols < 1) return GM_E_SHAPE;
  GM_DISPATCH_FLOAT(dtype, T, {
    const int64_t grain = 16384 / cols + 1;  // about 16k elements a task
    return gm::parallel_for(rows, grain, [=](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r)
        gm::rms_norm_row(static_cast<const T*>(x) + r * x_row_stride, static_cast<const T*>(w),
                         static_cast<T*>(out) + r * out_row_stride, cols, eps);
    });
  })
}
