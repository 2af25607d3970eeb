// SwiGLU's gate to 8-bit codes and scales: silu(x[r, c]) * x[r, cols + c] in float32, rounded to the dtype of x,
// quantized.
// gm-levels: base avx2 avx512 neon
#include "_quantize_values_cpu.h"
#include "calls/silu_and_mul_quant.h"

// x has the gate first.
GM_CPU_CALL(gm_silu_and_mul_quant, SiluAndMulQuant)(const GmSiluAndMulQuantCall& call) {
  return gm::quantize_rows(call, 2048, [&](auto type, int64_t r, const auto& take) {
    using T = decltype(type);
    const T *gate = static_cast<const T*>(call.x) + r * call.x_stride[0], *up = gate + call.n;
    take([=](int64_t c, int64_t n) {
      const bool whole = n == gm::kLanes;
      const gm::vf g = whole ? gm::load(gate + c) : gm::load(gate + c, n);
      return gm::rounded<T>(gm::silu(g) * (whole ? gm::load(up + c) : gm::load(up + c, n)));
    });
  });
}
