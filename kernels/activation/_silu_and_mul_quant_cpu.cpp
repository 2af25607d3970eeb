// SwiGLU's gate to 8-bit codes and scales:
// silu(x[r, c]) * x[r, cols + c] in float32, rounded to the dtype of x, quantized.
// gm-levels: base avx2 avx512 neon
#include "_quantize_values_cpu.h"
#include "calls/silu_and_mul_quant.h"

namespace {

template <class T, class Code>
int silu_and_mul_quant(const GmSiluAndMulQuantCall& call, const gm::RowFormat& format) {
  const int64_t cols = call.n, groups = gm::scales_of_row(format, cols);
  return gm::parallel_for(call.m, 2048 / cols + 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T *gate = static_cast<const T*>(call.x) + r * call.x_stride[0], *up = gate + cols;
      const auto values = [=](int64_t c, int64_t n) {
        const bool whole = n == gm::kLanes;
        const gm::vf g = whole ? gm::load(gate + c) : gm::load(gate + c, n);
        return gm::rounded<T>(gm::silu(g) * (whole ? gm::load(up + c) : gm::load(up + c, n)));
      };
      gm::quantize_values(values, cols, static_cast<Code*>(call.codes) + r * call.codes_stride[0],
                          static_cast<float*>(call.scales) + r * groups, format);
    }
  });
}

}  // namespace

// x has the gate first. The scale of the tensor is read, others are written.
GM_CPU_CALL(gm_silu_and_mul_quant, SiluAndMulQuant)(const GmSiluAndMulQuantCall& call) {
  if (call.m < 0 || call.n < 1) return GM_E_SHAPE;
  const gm::RowFormat format = gm::row_format(call.format);
  GM_DISPATCH_FLOAT(call.x_type, T, {
    return call.q_type == GM_I8 ? silu_and_mul_quant<T, int8_t>(call, format)
                                : silu_and_mul_quant<T, gm::f8e4m3>(call, format);
  })
}
