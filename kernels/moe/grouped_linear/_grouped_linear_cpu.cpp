// Rows sorted by expert times their expert's weight; the meaning is in op.py. Only experts with
// rows are read.
// gm-levels: base avx2 avx512 avx512_bf16 neon
#include <cstdlib>

#include "calls/grouped_linear.h"
#include "gm_linear_epilogue.h"
#include "moe/_expert_product_cpu.h"
#include "moe/_moe_cpu.h"

namespace {

template <class T>
int grouped(const gm::Rows16& w, const GmGroupedLinearCall& call, const moe::Epilogue& epilogue) {
  const int64_t experts = w.experts, k = w.k, rows = call.m;
  const int32_t *offsets = static_cast<const int32_t*>(call.expert_offsets),
                *permutation = static_cast<const int32_t*>(call.permutation);
  const T* x = static_cast<const T*>(call.x);
  T* out = static_cast<T*>(call.out);
  const int64_t width = epilogue.gate ? w.n / 2 : w.n;
  int64_t max_rows = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t count = int64_t(offsets[e + 1]) - offsets[e];
    if (count < 0) return GM_E_ARG;
    max_rows = count > max_rows ? count : max_rows;
  }
  if (offsets[0] != 0 || offsets[experts] > rows) return GM_E_ARG;
  T* gathered = nullptr;
  if (permutation != nullptr && max_rows > 0) {
    gathered = static_cast<T*>(std::malloc(sizeof(T) * size_t(max_rows) * size_t(k)));
    if (gathered == nullptr) return GM_E_NOMEM;
  }
  int code = GM_OK;
  for (int64_t e = 0; e < experts && code == GM_OK; ++e) {
    const int64_t first = offsets[e], count = offsets[e + 1] - first;
    if (count == 0) continue;
    const T* from = x + first * k;
    if (permutation != nullptr) {
      if (!moe::gather(x, call.rows, k, permutation + first, count, call.top_k, k, gathered)) code = GM_E_ARG;
      from = gathered;
    }
    if (code == GM_OK)
      code = moe::expert_product(w, e, from, k, out + first * width, count, epilogue, int(call.x_type));
  }
  std::free(gathered);
  if (code == GM_OK)
    std::memset(out + offsets[experts] * width, 0,
                sizeof(T) * size_t(rows - offsets[experts]) * size_t(width));
  return code;
}

}  // namespace

// Options: as of gm_linear_rows16 (_linear_cpu.cpp).
GM_CPU_CALL(gm_grouped_linear, GroupedLinear, format, columns, group, zero, e8m0)
(const GmGroupedLinearCall& call, const gm_grouped_linear_options& options) {
  gm::Rows16 w;
  const int code =
      gm::read_rows16(&w, call.weight, call.weight_size, call.weight_type, call.n, call.k, options);
  if (code != GM_OK) return code;
  const int gate = call.clamp ? lin::kClamped : call.silu_mul ? lin::kSilu : lin::kUngated;
  if (w.experts != call.e || call.m < 0 || call.rows < 0 || call.top_k < 1 || (gate && w.n % 2))
    return GM_E_SHAPE;
  if (call.permutation == nullptr && call.rows != call.m) return GM_E_SHAPE;
  GM_DISPATCH_FLOAT(call.x_type, T,
                    { return grouped<T>(w, call, {call.bias, gate, float(call.alpha), float(call.limit)}); })
}
