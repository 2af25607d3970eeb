// The experts of each token in one call; the meaning is in op.py. Experts without tokens are not read.
// gm-levels: base avx2 avx512 avx512_bf16 neon
#include <cstdlib>

#include "moe/_expert_product_cpu.h"
#include "moe/_moe_cpu.h"

namespace {

template <class T>
int experts_of(const moe::Weights& w13, const moe::Weights& w2, const T* x, const float* weights,
               const int32_t* ids, const moe::Epilogue& first_epilogue, const moe::Epilogue& second_epilogue,
               int32_t* offsets, int32_t* permutation, int32_t* inverse, T* acts, T* rows, T* out,
               int64_t tokens, int64_t top_k, int64_t experts, int dtype) {
  const int64_t hidden = w13.k, inner = w2.k, entries = tokens * top_k;
  moe::sort_by_expert(ids, offsets, permutation, inverse, entries, experts);
  int64_t most = 0;
  for (int64_t e = 0; e < experts; ++e)
    most = offsets[e + 1] - offsets[e] > most ? offsets[e + 1] - offsets[e] : most;
  if (most > 0) {
    T* gathered = static_cast<T*>(std::malloc(sizeof(T) * size_t(most) * size_t(hidden)));
    if (gathered == nullptr) return GM_E_NOMEM;
    int code = GM_OK;
    for (int64_t e = 0; e < experts && code == GM_OK; ++e) {
      const int64_t first = offsets[e], count = offsets[e + 1] - first;
      if (count == 0) continue;
      if (!moe::gather(x, tokens, hidden, permutation + first, count, top_k, hidden, gathered))
        code = GM_E_ARG;
      if (code == GM_OK)
        code =
            moe::expert_product(w13, e, gathered, hidden, acts + first * inner, count, first_epilogue, dtype);
      if (code == GM_OK)
        code = moe::expert_product(w2, e, acts + first * inner, inner, rows + first * hidden, count,
                                   second_epilogue, dtype);
    }
    std::free(gathered);
    if (code != GM_OK) return code;
  }
  return moe::combine(rows, entries, inverse, weights, out, tokens, top_k, hidden);
}

}  // namespace

// w13_bias [experts, 2 inner] and w2_bias [experts, hidden] of x's dtype or null; gate 1 or 2, alpha, limit:
// see moe::Epilogue. x [tokens, hidden], weights and ids [tokens, top_k] -> out [tokens, hidden]. Scratch:
// offsets [experts + 1], permutation and inverse [tokens * top_k], acts [tokens * top_k, inner], rows [tokens
// * top_k, hidden].
GM_KERNEL(gm_moe)(const moe::Weights* w13, const moe::Weights* w2, const void* x, const float* weights,
                  const int32_t* ids, const void* w13_bias, const void* w2_bias, int32_t* offsets,
                  int32_t* permutation, int32_t* inverse, void* acts, void* rows, void* out, int64_t tokens,
                  int64_t top_k, int64_t experts, int gate, float alpha, float limit, int dtype) {
  if (tokens < 0 || top_k < 1 || experts < 1 || tokens * top_k > INT32_MAX) return GM_E_SHAPE;
  if (w13->n != 2 * w2->k || w2->n != w13->k || w2->k < 1 || w2->n < 1) return GM_E_SHAPE;
  if (gate != 1 && gate != 2) return GM_E_ARG;
  if (tokens == 0) return GM_OK;
  GM_DISPATCH_FLOAT(dtype, T, {
    return experts_of(*w13, *w2, static_cast<const T*>(x), weights, ids, {w13_bias, gate, alpha, limit},
                      {w2_bias, 0, 0, 0}, offsets, permutation, inverse, static_cast<T*>(acts),
                      static_cast<T*>(rows), static_cast<T*>(out), tokens, top_k, experts, dtype);
  })
}
