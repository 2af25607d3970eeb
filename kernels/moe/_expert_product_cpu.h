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

extern "C" int GM_CAT(gm_linear_rows16_clamped,
                      GM_LEVEL)(const void* x, int64_t x_row_stride, const void* codes, const void* scales,
                                const void* zeros, const void* row_scale, const void* perm, const void* bias,
                                void* out, int64_t m, int64_t n, int64_t k, int64_t columns, int64_t group,
                                int format, int scale_type, int zero_type, int implicit_zero, float alpha,
                                float limit, int dtype);

namespace {
namespace moe {

// What follows a product: a bias [experts, n] of x's dtype or null; then gate 0 nothing, 1 silu(gate) * up, 2
// the clamped activation with alpha and limit.
struct Epilogue {
  const void* bias;
  int gate;
  float alpha, limit;
};

// The weights [experts, n, k] of one product,
// packed as cpu_rows16_v1, and how to read them: see gm_linear_rows16.
struct Weights {
  const void *codes, *scales, *zeros, *row_scale, *perm;
  int64_t n, k, columns, group;
  int32_t format, scale_type, zero_type, implicit_zero;
};

// rows of x through expert e.
inline int expert_product(const Weights& w, int64_t e, const void* x, int64_t x_stride, void* out,
                          int64_t rows, const Epilogue& epilogue, int dtype) {
  static const int bits[7] = {4, 4, 8, 8, 32, 16, 16};
  if (w.format < 0 || w.format > 6 || w.group < 1) return GM_E_ARG;
  const int64_t blocks = (w.n + 15) / 16, groups = w.columns / w.group, scales = blocks * groups * 16;
  const auto at = [](const void* base, int64_t bytes) -> const void* {
    return base ? static_cast<const char*>(base) + bytes : nullptr;
  };
  const void* codes = at(w.codes, e * blocks * 16 * w.columns * bits[w.format] / 8);
  const void* of_groups = at(w.scales, w.scale_type < 0 ? 0 : e * scales * gm::item_bytes(w.scale_type));
  const void* zeros = at(w.zeros, w.zero_type < 0 ? 0 : e * scales * gm::item_bytes(w.zero_type));
  const void* of_rows = at(w.row_scale, e * blocks * 16 * 4);
  const void* bias = at(epilogue.bias, e * w.n * gm::item_bytes(dtype));
  if (epilogue.gate == 2)
    return GM_CAT(gm_linear_rows16_clamped, GM_LEVEL)(
        x, x_stride, codes, of_groups, zeros, of_rows, w.perm, bias, out, rows, w.n, w.k, w.columns, w.group,
        w.format, w.scale_type, w.zero_type, w.implicit_zero, epilogue.alpha, epilogue.limit, dtype);
  return GM_CAT(gm_linear_rows16, GM_LEVEL)(x, x_stride, codes, of_groups, zeros, of_rows, w.perm, bias,
                                            nullptr, out, rows, w.n, w.k, w.columns, w.group, w.format,
                                            w.scale_type, w.zero_type, w.implicit_zero, epilogue.gate, dtype);
}

}  // namespace moe
}  // namespace
