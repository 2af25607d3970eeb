// Weighted sum of each token's expert rows; the meaning is in op.py.
// gm-levels: base avx2 avx512 neon
#include "calls/combine.h"
#include "moe/_moe_cpu.h"

GM_CPU_CALL(gm_moe_combine, Combine)(const GmCombineCall& call) {
  if (call.m < 0 || call.top_k < 1 || call.h < 1 || call.rows < 0) return GM_E_SHAPE;
  GM_DISPATCH_FLOAT(call.x_type, T, {
    return moe::combine(static_cast<const T*>(call.y), call.rows, static_cast<const int32_t*>(call.inverse),
                        static_cast<const float*>(call.weights), static_cast<T*>(call.out), call.m,
                        call.top_k, call.h);
  })
}
