// Weights of cpu_rows16_v1 (quant/layouts/cpu_rows16_v1.py) as native entries get them, and the arguments of the product
// with one of them, for linear, grouped_linear and moe.
#pragma once
#include "gm_cpu.h"
#include "gm_linear_decode.h"

namespace gm {

// experts times [n, k].
struct Rows16 {
  const void *codes, *scales, *zeros, *row_scale, *perm;  // all but codes may be null
  int64_t experts, n, k;
  int64_t columns;            // K' of the packing
  int64_t group;              // columns of a scale; `columns` where there is one per row
  int format;                 // 0 int4, 1 e2m1, 2 int8, 3 e4m3, 4 f32, 5 f16, 6 bf16
  int scale_type, zero_type;  // dtype codes, kE8M0 or kNone
  int implicit_zero;          // of integer codes without stored ones
};

// x [m, k] times a weight of one expert -> out [m, n], or [m, n / 2] with a gate, whose first half is the gate.
struct Rows16Product {
  Rows16 weight{};
  const void* x = nullptr;
  int64_t x_row_stride = 0;
  const void *bias = nullptr, *residual = nullptr;  // [n], and like out; of x's dtype, or null
  void* out = nullptr;
  int64_t m = 0;
  int gate = 0;  // lin::Gate
  float alpha = 0, limit = 0;
  int type = 0;  // dtype code of x
};

namespace {

// Fills a Rows16 from the five tensors of a weight with n rows and k columns, `size` elements each, of dtypes `type`.
// Options: what the scheme determines, by the names that kernels/linear/cpu.py gives them. GM_E_SHAPE or GM_E_DTYPE if the
// tensors are no such weight.
template <class Options>
int read_rows16(Rows16* w, const void* const* tensors, const int64_t* size, const int64_t* type, int64_t n,
                int64_t k, const Options& o) {
  for (int i = 0; i < 5; ++i)
    if (size[i] < 0) return GM_E_SHAPE;  // not contiguous
  if (type[0] != GM_U8 || type[3] != GM_F32 || type[4] != GM_I32) return GM_E_DTYPE;
  const int64_t blocks = (n + 15) / 16, multiple = o.group ? o.group : 32;
  const int64_t columns = size[4] ? size[4] : (k + multiple - 1) / multiple * multiple;
  if (n < 1 || k < 1 || columns % o.columns) return GM_E_SHAPE;
  const int64_t codes = blocks * (columns / o.columns) * 64, experts = size[0] / codes;
  const int64_t group = o.group ? o.group : columns;
  const int64_t scales = experts * blocks * (columns / group) * 16;
  if (experts < 1 || size[0] != experts * codes) return GM_E_SHAPE;
  // A scheme has scales, zero points and scales of rows, or it does not; what tells no more is the format of codes of one size.
  const bool dense = o.format >= 4, zeros = (o.format == 0 || o.format == 2) && !o.zero;
  const bool nvfp4 = o.format == 1 && !o.e8m0;
  if (size[1] != (dense ? 0 : scales) || size[2] != (zeros ? scales : 0)) return GM_E_SHAPE;
  if (size[3] && (!nvfp4 || size[3] != experts * blocks * 16)) return GM_E_SHAPE;
  const bool floats = type[1] == GM_F32 || type[1] == GM_F16 || type[1] == GM_BF16;
  if (!dense && !(o.e8m0 ? type[1] == GM_U8 : nvfp4 ? type[1] == lin::kE4M3 : floats)) return GM_E_DTYPE;
  const auto given = [&](int i) { return size[i] ? tensors[i] : nullptr; };
  *w = {.codes = tensors[0],
        .scales = given(1),
        .zeros = given(2),
        .row_scale = given(3),
        .perm = given(4),
        .experts = experts,
        .n = n,
        .k = k,
        .columns = columns,
        .group = group,
        .format = int(o.format),
        .scale_type = !size[1] ? int(lin::kNone)
                      : o.e8m0 ? int(lin::kE8M0)
                               : int(type[1]),
        .zero_type = size[2] ? int(type[2]) : int(lin::kNone),
        .implicit_zero = size[2] ? 0 : int(o.zero)};
  return GM_OK;
}

// Sets what a kernel's parameters have of a weight.
template <class Params>
void set_weight(Params* p, const Rows16& w) {
  p->codes = static_cast<const uint8_t*>(w.codes), p->scales = w.scales, p->zeros = w.zeros;
  p->row_scale = static_cast<const float*>(w.row_scale);
  p->scale_type = w.scale_type, p->zero_type = w.zero_type;
  p->n = w.n, p->k = w.k, p->columns = w.columns;
}

}  // namespace
}  // namespace gm
