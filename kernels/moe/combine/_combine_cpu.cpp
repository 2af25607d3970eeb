// Weighted sum of each token's expert rows; the meaning is in op.py.
// gm-levels: base avx2 avx512 neon
#include "moe/_moe_cpu.h"

// y [y_rows, width] with a row stride, inverse and weights [tokens, top_k] -> out [tokens, width].
GM_KERNEL(gm_moe_combine)(const void* y, int64_t y_rows, int64_t y_stride, const int32_t* inverse,
                          const float* weights, void* out, int64_t tokens, int64_t top_k, int64_t width,
                          int dtype) {
  if (tokens < 0 || top_k < 1 || width < 1 || y_rows < 0) return GM_E_SHAPE;
  GM_DISPATCH_FLOAT(dtype, T, {
    return moe::combine(static_cast<const T*>(y), y_rows, y_stride, inverse, weights, static_cast<T*>(out),
                        tokens, top_k, width);
  })
}
