// The experts of each token in one call; the meaning is in op.py. Experts without tokens are not read.
// gm-levels: base avx2 avx512 avx512_bf16 neon
#include <cstdlib>

#include "activation/_functions_cpu.h"
#include "calls/moe.h"
#include "gm_linear_epilogue.h"
#include "moe/_expert_product_cpu.h"
#include "moe/_moe_cpu.h"

namespace {

// Parts of the workspace, each aligned to 256 bytes, as in kernels/moe/_chain.py.
struct Parts {
  int32_t *offsets, *permutation, *inverse;  // [experts + 1], [entries], [entries]
  void *acts, *rows;                         // [entries, inner], [entries, hidden]
};
int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

bool divide_workspace(Parts* parts, const GmMoeCall& call, int64_t experts) {
  const int64_t entries = call.m * call.top_k, item = gm::item_bytes(call.x_type);
  const int64_t bytes[5] = {4 * (experts + 1), 4 * entries, 4 * entries, entries * call.inter * item,
                            entries * call.h * item};
  if (call.workspace == nullptr) return false;
  char *place[5], *next = static_cast<char*>(call.workspace);
  for (int i = 0; i < 5; ++i) place[i] = next, next += aligned(bytes[i]);
  if (next - place[0] > call.workspace_bytes) return false;
  *parts = {reinterpret_cast<int32_t*>(place[0]), reinterpret_cast<int32_t*>(place[1]),
            reinterpret_cast<int32_t*>(place[2]), place[3], place[4]};
  return true;
}

// silu(gate) * up, clamped or not: an epilogue of the first product. Other activations are a pass over its result.
bool is_swiglu(const GmMoeCall& call) { return call.gated && call.activation == GmMoeCall::Activation::silu; }

// z [rows, 2 * inner], gate first, or [rows, inner], which may be out -> out [rows, inner].
template <class T>
int activate(const GmMoeCall& call, const T* z, T* out, int64_t rows) {
  const int64_t inner = call.inter;
  return gm::parallel_for(rows, 4096 / inner + 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      act::with_function(call.activation, [&](const auto& f) {
        if (call.gated)
          act::gate_row(z + r * 2 * inner, z + r * 2 * inner + inner, out + r * inner, inner, f);
        else
          act::map_row(z + r * inner, out + r * inner, inner, f);
      });
  });
}

template <class T>
int experts_of(const GmMoeCall& call, const gm::Rows16& w13, const gm::Rows16& w2, const Parts& parts) {
  const int64_t hidden = call.h, inner = call.inter, top_k = call.top_k, entries = call.m * top_k;
  const bool swiglu = is_swiglu(call), has_z = call.gated && !swiglu;
  const int gate = !swiglu ? lin::kUngated : call.clamp ? lin::kClamped : lin::kSilu;
  const moe::Epilogue first_epilogue{call.w13_bias, gate, float(call.alpha), float(call.limit)},
      second_epilogue{call.w2_bias, lin::kUngated, 0, 0};
  const int32_t* offsets = parts.offsets;
  T *acts = static_cast<T*>(parts.acts), *rows = static_cast<T*>(parts.rows);
  const int type = int(call.x_type);
  moe::sort_by_expert(static_cast<const int32_t*>(call.ids), parts.offsets, parts.permutation, parts.inverse,
                      entries, w13.experts);
  int64_t max_rows = 0;
  for (int64_t e = 0; e < w13.experts; ++e)
    max_rows = offsets[e + 1] - offsets[e] > max_rows ? offsets[e + 1] - offsets[e] : max_rows;
  if (max_rows > 0) {
    const int64_t width = hidden + (has_z ? 2 * inner : 0);
    T* gathered = static_cast<T*>(std::malloc(sizeof(T) * size_t(max_rows) * size_t(width)));
    if (gathered == nullptr) return GM_E_NOMEM;
    int code = GM_OK;
    for (int64_t e = 0; e < w13.experts && code == GM_OK; ++e) {
      const int64_t first = offsets[e], count = offsets[e + 1] - first;
      if (count == 0) continue;
      T *to = acts + first * inner, *z = has_z ? gathered + max_rows * hidden : to;
      if (!moe::gather(static_cast<const T*>(call.x), call.m, hidden, parts.permutation + first, count, top_k,
                       hidden, gathered))
        code = GM_E_ARG;
      if (code == GM_OK) code = moe::expert_product(w13, e, gathered, hidden, z, count, first_epilogue, type);
      if (code == GM_OK && !swiglu) code = activate(call, z, to, count);
      if (code == GM_OK)
        code = moe::expert_product(w2, e, to, inner, rows + first * hidden, count, second_epilogue, type);
    }
    std::free(gathered);
    if (code != GM_OK) return code;
  }
  return moe::combine(rows, entries, parts.inverse, static_cast<const float*>(call.weights),
                      static_cast<T*>(call.out), call.m, top_k, hidden);
}

}  // namespace

// Options: as of gm_linear_rows16 (_linear_cpu.cpp), for both weights.
GM_CPU_CALL(gm_moe, Moe, format, columns, group, zero, e8m0)(const GmMoeCall& call,
                                                             const gm_moe_options& options) {
  gm::Rows16 w13, w2;
  int code = gm::read_rows16(&w13, call.w13, call.w13_size, call.w13_type,
                             call.gated ? 2 * call.inter : call.inter, call.h, options);
  if (code == GM_OK)
    code = gm::read_rows16(&w2, call.w2, call.w2_size, call.w2_type, call.h, call.inter, options);
  if (code != GM_OK) return code;
  if (call.clamp && !is_swiglu(call)) return GM_E_ARG;
  if (w13.experts != w2.experts || call.m < 0 || call.top_k < 1 || call.m * call.top_k > INT32_MAX)
    return GM_E_SHAPE;
  if (call.m == 0) return GM_OK;
  Parts parts;
  if (!divide_workspace(&parts, call, w13.experts)) return GM_E_SHAPE;
  GM_DISPATCH_FLOAT(call.x_type, T, { return experts_of<T>(call, w13, w2, parts); })
}
