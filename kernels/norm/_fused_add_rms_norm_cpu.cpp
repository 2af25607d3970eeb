// residual[r, c] += x[r, c], rounded to the dtype; out[r, c] = residual[r, c] / sqrt(mean_c(residual[r, c]^2)
// + eps) * w[c], summed and scaled in float32 from the stored residual, rounded once.
#include "_rms_norm_row_cpu.h"
#include "calls/fused_add_rms_norm.h"

namespace {

template <class T, class W>
void add_rms_norm_row(const T* x, T* residual, const W* w, T* out, int64_t cols, float eps) {
  constexpr int L = gm::kLanes;
  gm::vf s0 = gm::zero(), s1 = gm::zero();  // two chains hide the latency of fma
  int64_t c = 0;
  for (; c + 2 * L <= cols; c += 2 * L) {
    gm::store(residual + c, gm::load(x + c) + gm::load(residual + c));
    gm::store(residual + c + L, gm::load(x + c + L) + gm::load(residual + c + L));
    const gm::vf a = gm::load(residual + c), b = gm::load(residual + c + L);
    s0 = gm::fma(a, a, s0);
    s1 = gm::fma(b, b, s1);
  }
  for (; c < cols; c += L) {
    const int64_t n = cols - c < L ? cols - c : L;
    if (n == L) {
      gm::store(residual + c, gm::load(x + c) + gm::load(residual + c));
    } else {
      gm::store(residual + c, gm::load(x + c, n) + gm::load(residual + c, n), n);
    }
    const gm::vf a = n == L ? gm::load(residual + c) : gm::load(residual + c, n);
    s0 = gm::fma(a, a, s0);
  }
  const float scale = 1.0f / __builtin_sqrtf(gm::sum(s0 + s1) / float(cols) + eps);
  for (c = 0; c + L <= cols; c += L) gm::store(out + c, gm::load(residual + c) * scale * gm::load(w + c));
  if (c < cols)
    gm::store(out + c, gm::load(residual + c, cols - c) * scale * gm::load(w + c, cols - c), cols - c);
}

}  // namespace

// out may be x. Rows of residual and of out must not overlap.
GM_CPU_CALL(gm_fused_add_rms_norm, FusedAddRmsNorm)(const GmFusedAddRmsNormCall& call) {
  if (call.m < 0 || call.n < 1) return GM_E_SHAPE;
  GM_DISPATCH_FLOAT(call.x_type, T, {
    return gm::each_row<T>(call, [&](int64_t r, auto weight) {
      add_rms_norm_row(static_cast<const T*>(call.x) + r * call.x_stride[0],
                       static_cast<T*>(call.residual) + r * call.residual_stride[0], weight,
                       static_cast<T*>(call.out) + r * call.out_stride[0], call.n, float(call.eps));
    });
  })
}
