// RMSNorm: out[r, c] = x[r, c] / sqrt(mean_c(x[r, c]^2) + eps) * w[c], summed and scaled in float32, rounded
// once. Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
#include "_rms_norm_row_cpu.h"
#include "calls/rms_norm.h"

// out may be x.
GM_CPU_CALL(gm_rms_norm, RmsNorm)(const GmRmsNormCall& call) {
  if (call.m < 0 || call.n < 1) return GM_E_SHAPE;
  GM_DISPATCH_FLOAT(call.x_type, T, {
    const int64_t grain = 16384 / call.n + 1;  // about 16k elements a task
    return gm::parallel_for(call.m, grain, [&](int64_t begin, int64_t end) {
      const float eps = float(call.eps);
      for (int64_t r = begin; r < end; ++r)
        gm::rms_norm_row(static_cast<const T*>(call.x) + r * call.x_stride[0],
                         static_cast<const T*>(call.weight),
                         static_cast<T*>(call.out) + r * call.out_stride[0], call.n, eps);
    });
  })
}
