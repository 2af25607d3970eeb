// The product with one expert's weights, by linear's core at this level. Only sources that multiply include
// it: the name of linear's entry in a source makes that source depend on linear's.
#pragma once
#include "gm_cpu.h"

extern "C" int GM_CAT(gm_linear_rows16,
                      GM_LEVEL)(const void* x, int64_t x_row_stride, const void* codes, const void* scales,
                                const void* zeros, const void* row_scale, const void* perm, const void* bias,
                                const void* residual, void* out, int64_t m, int64_t n, int64_t k,
                                int64_t columns, int64_t group, int format, int scale_type, int zero_type,
                                int implicit_zero, int silu, int dtype);

namespace {
namespace moe {

// The weights [experts, n, k] of one product, packed as cpu_rows16_v1, and how to read them: see
// gm_linear_rows16.
struct Weights {
  const void *codes, *scales, *zeros, *row_scale, *perm;
  int64_t n, k, columns, group;
  int32_t format, scale_type, zero_type, implicit_zero;
};

inline int item_bytes(int type) { return type == GM_F32 ? 4 : type == GM_F16 || type == GM_BF16 ? 2 : 1; }

// rows of x through expert e.
inline int expert_product(const Weights& w, int64_t e, const void* x, int64_t x_stride, void* out,
                          int64_t rows, bool silu, int dtype) {
  static const int bits[7] = {4, 4, 8, 8, 32, 16, 16};
  if (w.format < 0 || w.format > 6 || w.group < 1) return GM_E_ARG;
  const int64_t blocks = (w.n + 15) / 16, groups = w.columns / w.group, scales = blocks * groups * 16;
  const auto at = [](const void* base, int64_t bytes) -> const void* {
    return base ? static_cast<const char*>(base) + bytes : nullptr;
  };
  return GM_CAT(gm_linear_rows16, GM_LEVEL)(
      x, x_stride, at(w.codes, e * blocks * 16 * w.columns * bits[w.format] / 8),
      at(w.scales, w.scale_type < 0 ? 0 : e * scales * item_bytes(w.scale_type)),
      at(w.zeros, w.zero_type < 0 ? 0 : e * scales * item_bytes(w.zero_type)),
      at(w.row_scale, e * blocks * 16 * 4), w.perm, nullptr, nullptr, out, rows, w.n, w.k, w.columns, w.group,
      w.format, w.scale_type, w.zero_type, w.implicit_zero, silu, dtype);
}

}  // namespace moe
}  // namespace
