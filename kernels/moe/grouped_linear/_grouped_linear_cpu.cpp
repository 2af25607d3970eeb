// Rows sorted by expert times their expert's weight; the meaning is in op.py. Only experts with
// rows are read.
// gm-levels: base avx2 avx512 avx512_bf16 neon
#include <cstdlib>

#include "moe/_expert_product_cpu.h"
#include "moe/_moe_cpu.h"

namespace {

template <class T>
int grouped(const moe::Weights& w, int64_t experts, const T* x, int64_t x_rows, int64_t k,
            const int32_t* offsets, const int32_t* permutation, int64_t top_k, T* out, int64_t rows,
            const moe::Epilogue& epilogue, int dtype) {
  const int64_t width = epilogue.gate ? w.n / 2 : w.n;
  int64_t most = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t count = int64_t(offsets[e + 1]) - offsets[e];
    if (count < 0) return GM_E_ARG;
    most = count > most ? count : most;
  }
  if (offsets[0] != 0 || offsets[experts] > rows) return GM_E_ARG;
  T* gathered = nullptr;
  if (permutation != nullptr && most > 0) {
    gathered = static_cast<T*>(std::malloc(sizeof(T) * size_t(most) * size_t(k)));
    if (gathered == nullptr) return GM_E_NOMEM;
  }
  int code = GM_OK;
  for (int64_t e = 0; e < experts && code == GM_OK; ++e) {
    const int64_t first = offsets[e], count = offsets[e + 1] - first;
    if (count == 0) continue;
    const T* from = x + first * k;
    if (permutation != nullptr) {
      if (!moe::gather(x, x_rows, k, permutation + first, count, top_k, k, gathered)) code = GM_E_ARG;
      from = gathered;
    }
    if (code == GM_OK) code = moe::expert_product(w, e, from, k, out + first * width, count, epilogue, dtype);
  }
  std::free(gathered);
  if (code == GM_OK)
    std::memset(out + offsets[experts] * width, 0,
                sizeof(T) * size_t(rows - offsets[experts]) * size_t(width));
  return code;
}

}  // namespace

// x [x_rows, k] contiguous, offsets [experts + 1], permutation [rows] or null (then x_rows = rows) -> out
// [rows, n or n / 2]. bias, gate, alpha, limit: see moe::Epilogue.
GM_KERNEL(gm_grouped_linear)(const moe::Weights* w, int64_t experts, const void* x, int64_t x_rows, int64_t k,
                             const int32_t* offsets, const int32_t* permutation, int64_t top_k, void* out,
                             int64_t rows, const void* bias, int gate, float alpha, float limit, int dtype) {
  if (experts < 1 || rows < 0 || x_rows < 0 || top_k < 1 || k != w->k || w->n < 1 || (gate && w->n % 2))
    return GM_E_SHAPE;
  if (gate < 0 || gate > 2) return GM_E_ARG;
  if (permutation == nullptr && x_rows != rows) return GM_E_SHAPE;
  GM_DISPATCH_FLOAT(dtype, T, {
    return grouped(*w, experts, static_cast<const T*>(x), x_rows, k, offsets, permutation, top_k,
                   static_cast<T*>(out), rows, {bias, gate, alpha, limit}, dtype);
  })
}
