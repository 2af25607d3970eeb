// Activations, in float32, rounded once: gelu(gate) * up of GEGLU (Shazeer, 2020), and functions of single values.
// gm-levels: base avx2 avx512 neon
#include "activation/_functions_cpu.h"
#include "calls/activation.h"
#include "calls/gelu_and_mul.h"

// x has the gate first; out may be the gate half of x.
GM_CPU_CALL(gm_gelu_and_mul, GeluAndMul)(const GmGeluAndMulCall& call) {
  using Approximate = GmGeluAndMulCall::Approximate;
  if (call.m < 0 || call.n < 1) return GM_E_SHAPE;
  GM_DISPATCH_FLOAT(call.x_type, T, {
    return gm::parallel_for(call.m, 4096 / call.n + 1, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T* row = static_cast<const T*>(call.x) + r * call.x_stride[0];
        T* out = static_cast<T*>(call.out) + r * call.out_stride[0];
        if (call.approximate == Approximate::tanh)
          act::gate_row(row, row + call.n, out, call.n, act::gelu_tanh);
        else
          act::gate_row(row, row + call.n, out, call.n, act::gelu);
      }
    });
  })
}

// out may be x.
GM_CPU_CALL(gm_activation, Activation)(const GmActivationCall& call) {
  if (call.m < 0 || call.n < 1) return GM_E_SHAPE;
  GM_DISPATCH_FLOAT(call.x_type, T, {
    return gm::parallel_for(call.m, 4096 / call.n + 1, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T* x = static_cast<const T*>(call.x) + r * call.x_stride[0];
        T* out = static_cast<T*>(call.out) + r * call.out_stride[0];
        act::with_function(call.function, [&](const auto& f) { act::map_row(x, out, call.n, f); });
      }
    });
  })
}
