// RMSNorm: out[r, c] = x[r, c] / sqrt(mean_c(x[r, c]^2) + eps) * w[c], summed and scaled in float32, rounded
// once. Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
#include "_rms_norm_row_cpu.h"
#include "calls/rms_norm.h"

// out may be x.
GM_CPU_CALL(gm_rms_norm, RmsNorm)(const GmRmsNormCall& call) {
  if (call.m < 0 || call.n < 1) return GM_E_SHAPE;
  GM_DISPATCH_FLOAT(call.x_type, T, {
    return gm::each_row<T>(call, [&](int64_t r, auto weight) {
      gm::rms_norm_row(static_cast<const T*>(call.x) + r * call.x_stride[0], weight,
                       static_cast<T*>(call.out) + r * call.out_stride[0], call.n, float(call.eps));
    });
  })
}
