// SwiGLU's gate: out[r, c] = silu(x[r, c]) * x[r, cols + c], in float32, rounded once.
// Shazeer, "GLU Variants Improve Transformer" (2020).
#include "calls/silu_and_mul.h"
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

// x has the gate first; out may be the gate half of x.
GM_CPU_CALL(gm_silu_and_mul, SiluAndMul)(const GmSiluAndMulCall& call) {
  if (call.m < 0 || call.n < 1) return GM_E_SHAPE;
  GM_DISPATCH_FLOAT(call.x_type, T, {
    const int64_t grain = 4096 / call.n + 1;
    return gm::parallel_for(call.m, grain, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T* row = static_cast<const T*>(call.x) + r * call.x_stride[0];
        silu_and_mul_row(row, row + call.n, static_cast<T*>(call.out) + r * call.out_stride[0], call.n);
      }
    });
  })
}
