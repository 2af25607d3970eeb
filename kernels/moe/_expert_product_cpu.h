// The product with one expert's weight, by linear's entry of this level. Include it only where it is used: it makes a
// source depend on linear's.
#pragma once
#include "gm_rows16.h"

extern "C" int GM_CAT(gm_rows16_product, GM_LEVEL)(const gm::Rows16Product& product);

namespace {
namespace moe {

// Epilogue of a product: a bias [experts, n] of x's dtype or null; then a gate (lin::Gate) with alpha and limit.
struct Epilogue {
  const void* bias;
  int gate;
  float alpha, limit;
};

// `rows` rows of x times the weight of expert e -> out.
inline int expert_product(const gm::Rows16& w, int64_t e, const void* x, int64_t x_stride, void* out,
                          int64_t rows, const Epilogue& epilogue, int type) {
  static const int bits[7] = {4, 4, 8, 8, 32, 16, 16};
  if (w.format < 0 || w.format > 6 || w.group < 1) return GM_E_ARG;
  const int64_t blocks = (w.n + 15) / 16, groups = w.columns / w.group, scales = blocks * groups * 16;
  const auto at = [](const void* base, int64_t bytes) -> const void* {
    return base ? static_cast<const char*>(base) + bytes : nullptr;
  };
  gm::Rows16Product p{.weight = w,
                      .x = x,
                      .x_row_stride = x_stride,
                      .bias = at(epilogue.bias, e * w.n * gm::item_bytes(type)),
                      .out = out,
                      .m = rows,
                      .gate = epilogue.gate,
                      .alpha = epilogue.alpha,
                      .limit = epilogue.limit,
                      .type = type};
  p.weight.codes = at(w.codes, e * blocks * 16 * w.columns * bits[w.format] / 8);
  p.weight.scales = at(w.scales, e * scales * gm::item_bytes(w.scale_type));
  p.weight.zeros = at(w.zeros, e * scales * gm::item_bytes(w.zero_type));
  p.weight.row_scale = at(w.row_scale, e * blocks * 16 * 4);
  return GM_CAT(gm_rows16_product, GM_LEVEL)(p);
}

}  // namespace moe
}  // namespace
