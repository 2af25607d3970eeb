// gm_linear_rows16 and gm_rows16_product under the sanitizers against float64: every packing, row
// counts on both sides of each tile, partial blocks of rows, tails of K, act-order, bias, residual, silu_mul,
// the clamped activation, wide and unaligned rows of x, every level.
//
// Planted faults that this program was seen to catch: the tail of `left` lanes in `finish` taken as a whole
// vector (write past out), the bound of `at` in `prepare` without j.k (read past a row of x), blocks past the
// last not repeated in `direct` (read past the codes), one group of scales too far in `close_group`,
// whole_tiles not rounding up (write past the scratch).
#include "calls/linear.h"
#define GM_LEVEL base  // for the types of gm_rows16.h
#include "gm_rows16.h"
#include "gm_linear_epilogue.h"
#include "packed_weight.h"

GM_LEVELS(gm_linear_rows16, (const GmLinearCall&, const Rows16Options&));
GM_LEVELS(gm_rows16_product, (const gm::Rows16Product&));
struct Call {
  decltype(gm_linear_rows16_levels[0].call) plain;
  decltype(gm_rows16_product_levels[0].call) product;
};
constexpr float kAlpha = 1.702f, kLimit = 1.25f;
using lin::kClamped, lin::kSilu, lin::kUngated;

namespace {

template <class D>
void run(Call call, int dtype, const Packing& packing, int64_t m, int64_t n, int64_t k, bool ordered,
         bool extras, int gate) {
  using T = typename D::T;
  const bool added = extras && gate != kClamped;  // a residual
  Numbers numbers;
  PackedWeight w(packing, 1, n, k, ordered, numbers);
  const int64_t width = gate ? n / 2 : n, stride = k + (extras ? 3 : 0);
  Buffer<T> x(m, k, stride), out(m, width, width), bias(extras ? n : 0), residual(added ? m * width : 0);
  for (int64_t r = 0; r < m; ++r)
    for (int64_t c = 0; c < k; ++c) x(r, c) = D::put(numbers.eighths());
  for (int64_t i = 0; extras && i < n; ++i) bias.data()[i] = D::put(numbers.eighths());
  for (int64_t i = 0; added && i < m * width; ++i) residual.data()[i] = D::put(numbers.eighths());
  GmLinearCall linear{.x = x.data(),
                      .x_stride = {stride},
                      .bias = extras ? bias.data() : nullptr,
                      .residual = added ? residual.data() : nullptr,
                      .silu_mul = gate == kSilu,
                      .n = n,
                      .out = out.data(),
                      .m = m,
                      .k = k,
                      .x_type = dtype};
  w.into(linear.weight, linear.weight_size, linear.weight_type);
  const auto given = [&](int i) { return linear.weight_size[i] ? linear.weight[i] : nullptr; };
  const gm::Rows16Product product{
      .weight = {given(0), given(1), given(2), given(3), given(4), 1, n, k, w.columns, w.group,
                 packing.format, packing.scale_type, packing.zero_type, packing.implicit_zero},
      .x = x.data(),
      .x_row_stride = stride,
      .bias = linear.bias,
      .out = out.data(),
      .m = m,
      .gate = kClamped,
      .alpha = kAlpha,
      .limit = kLimit,
      .type = dtype};
  const int code = gate == kClamped ? call.product(product) : call.plain(linear, w.options());
  CHECK(code == 0);
  std::vector<double> row(k), size(n), y(n);
  std::vector<std::vector<double>> weight(n, std::vector<double>(k, 0.0));
  for (int64_t i = 0; i < n; ++i)
    for (int64_t c = 0; c < w.columns; ++c)
      if (w.source(c) >= 0) weight[i][w.source(c)] = w.at(0, i, c);
  for (int64_t r = 0; r < m; ++r) {
    for (int64_t i = 0; i < n; ++i) {
      y[i] = extras ? D::get(bias.data()[i]) : 0.0;
      size[i] = std::fabs(y[i]);
      for (int64_t c = 0; c < k; ++c) {
        const double term = weight[i][c] * D::get(x(r, c));
        y[i] += term, size[i] += std::fabs(term);
      }
    }
    for (int64_t i = 0; i < width; ++i) {
      double wanted = y[i], bound = size[i];
      if (gate) bound = size[i] * (std::fabs(y[i + width]) + 1) + size[i + width] * (std::fabs(y[i]) + 1);
      if (gate == kSilu) wanted = y[i] / (1 + std::exp(-y[i])) * y[i + width];
      if (gate == kClamped) {
        const double g = std::fmin(y[i], kLimit), u = std::fmax(std::fmin(y[i + width], kLimit), -kLimit);
        wanted = g / (1 + std::exp(-kAlpha * g)) * (u + 1);
      }
      if (added) wanted += D::get(residual.data()[r * width + i]);
      if (dtype == 1 && std::fabs(wanted) > 60000) continue;  // near float16's end
      // int8 codes less their zero are summed before the zero is taken off:
      // the terms are up to 255 times a scale.
      const double zeros = packing.zero_type >= 0 ? 32 : 2;
      CHECK(std::fabs(D::get(out(r, i)) - wanted) <=
            1e-5 + zeros * 1e-6 * bound + D::kEps * std::fabs(wanted));
    }
  }
}

template <class D>
void all(Call call, int dtype) {
  for (const Packing& p : packings()) {
    for (const int64_t m : {0, 1, 2, 3, 5, 8, 9, 17})
      run<D>(call, dtype, p, m, 17, 70, false, m & 1, kUngated);
    for (const int64_t n : {1, 7, 16, 131}) run<D>(call, dtype, p, 1, n, 128, false, true, kUngated);
    run<D>(call, dtype, p, 4, 33, 257, true, false, kUngated);  // two chunks of decoded columns
    run<D>(call, dtype, p, 11, 18, 257, true, true, kSilu);
    run<D>(call, dtype, p, 2, 2, 1, false, false, kSilu);
    run<D>(call, dtype, p, 5, 66, 70, false, true, kClamped);
    run<D>(call, dtype, p, 1, 2, 33, true, false, kClamped);
  }
  run<D>(call, dtype, packings()[0], 259, 3, 9, false, true, kUngated);  // two chunks of rows of x
  const auto refused = [&](int64_t n, int64_t k, int64_t columns, int64_t group, int format, int gate) {
    return call.product({.weight = {.experts = 1,
                                    .n = n,
                                    .k = k,
                                    .columns = columns,
                                    .group = group,
                                    .format = format,
                                    .scale_type = -1,
                                    .zero_type = -1},
                         .m = 1,
                         .gate = gate,
                         .type = dtype});
  };
  CHECK(refused(0, 16, 16, 16, 0, 0) == -2);
  CHECK(refused(4, 33, 32, 32, 0, 0) == -2);
  CHECK(refused(4, 24, 24, 24, 0, 0) == -2);
  CHECK(refused(4, 32, 32, 12, 0, 0) == -2);
  CHECK(refused(3, 32, 32, 32, 0, kSilu) == -2);
  CHECK(refused(3, 32, 32, 32, 0, kClamped) == -2);
  CHECK(refused(4, 32, 32, 32, 7, 0) == -5);
  // Tensors that do not pack the weight.
  Numbers numbers;
  PackedWeight w(packings()[1], 1, 20, 70, false, numbers);
  GmLinearCall linear{.n = 20, .k = 70, .x_type = dtype};
  w.into(linear.weight, linear.weight_size, linear.weight_type);
  CHECK(call.plain(linear, w.options()) == 0);
  const auto with = [&](auto change) {
    GmLinearCall changed = linear;
    change(changed);
    return call.plain(changed, w.options());
  };
  CHECK(with([](GmLinearCall& c) { c.n = 40; }) == -2);
  CHECK(with([](GmLinearCall& c) { c.k = 97; }) == -2);
  CHECK(with([](GmLinearCall& c) { c.k = 1; }) == -2);
  CHECK(with([](GmLinearCall& c) { c.weight_size[0] = -1; }) == -2);  // not contiguous
  CHECK(with([](GmLinearCall& c) { c.weight_size[0] *= 2, c.weight_size[1] *= 2; }) == -2);
  CHECK(with([](GmLinearCall& c) { c.weight_size[1] -= 1; }) == -2);
  CHECK(with([](GmLinearCall& c) { c.weight_size[2] = 1; }) == -2);
  CHECK(with([](GmLinearCall& c) { c.weight_size[3] = 20; }) == -2);
  CHECK(with([](GmLinearCall& c) { c.weight_size[4] = 64; }) == -2);
  CHECK(with([](GmLinearCall& c) { c.weight_type[0] = 5; }) == -1);
  CHECK(with([](GmLinearCall& c) { c.x_type = 99, c.m = 1; }) == -1);
}

}  // namespace

int main() {
  int ran = 0;
  const auto* product = gm_rows16_product_levels;
  for (const auto& level : gm_linear_rows16_levels) {
    const auto& of_level = *product++;
    const Call call{level.call, of_level.call};
    if (level.call == nullptr) continue;
    const bool both[] = {runs_here(level.name), runs_here(of_level.name)};
    if (!both[0] || !both[1]) continue;
    all<Dtype<0>>(call, 0);
    all<Dtype<1>>(call, 1);
    all<Dtype<2>>(call, 2);
    ++ran;
  }
  CHECK(ran > 0);
  std::printf("linear: %d level(s)\n", ran);
}
