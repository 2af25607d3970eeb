// gm_linear_a8_rows16 under the sanitizers against float64: integer and e2m1 packings, whole rows and blocks
// of x, row counts on both sides of each tile, partial blocks of rows, tails of K, act-order, bias, residual,
// silu_mul, wide and unaligned rows of x, every level.
//
// Planted faults that this program was seen to catch: one line too many in a run of int16 sums (saturates),
// the bound j.k in quantize_row (reads past a row of x), x_sums of the next unit in tile (wrong zero),
// tile_rows without rounding up (rows left out).
#include "packed_weight.h"

GM_LEVELS(gm_linear_a8_rows16, (const void*, int64_t, const void*, const void*, const void*, const void*,
                                const void*, const void*, const void*, void*, int64_t, int64_t, int64_t,
                                int64_t, int64_t, int, int, int, int, int, int, int64_t));
using Call = decltype(gm_linear_a8_rows16_levels[0].call);

namespace {

// The quantized value of each column of a row: blocks of `block` columns in the order of the packing.
template <class D>
std::vector<double> quantized(typename D::T* x, PackedWeight& w, int64_t block) {
  std::vector<double> values(w.columns, 0.0);
  for (int64_t c0 = 0; c0 < w.columns; c0 += block) {
    const int64_t end = c0 + block < w.columns ? c0 + block : w.columns;
    float amax = 1e-10f;
    for (int64_t c = c0; c < end; ++c)
      if (w.source(c) >= 0) amax = std::fmax(amax, std::fabs(D::get(x[w.source(c)])));
    const float scale = amax / 127.0f;
    for (int64_t c = c0; c < end; ++c)
      if (w.source(c) >= 0) values[c] = double(std::nearbyint(D::get(x[w.source(c)]) / scale)) * scale;
  }
  return values;
}

template <class D>
void run(Call call, int dtype, const Packing& packing, int64_t block, int64_t m, int64_t n, int64_t k,
         bool ordered, bool extras, bool silu) {
  using T = typename D::T;
  Numbers numbers;
  PackedWeight w(packing, 1, n, k, ordered, numbers);
  if (block == 0) block = w.columns;
  const int64_t width = silu ? n / 2 : n, stride = k + (extras ? 3 : 0);
  Buffer<T> x(m, k, stride), out(m, width, width), bias(extras ? n : 0), residual(extras ? m * width : 0);
  for (int64_t r = 0; r < m; ++r)
    for (int64_t c = 0; c < k; ++c) x(r, c) = D::put(r == 2 ? 3.0f : numbers.eighths());
  for (int64_t i = 0; extras && i < n; ++i) bias.data()[i] = D::put(numbers.eighths());
  for (int64_t i = 0; extras && i < m * width; ++i) residual.data()[i] = D::put(numbers.eighths());
  CHECK(call(x.data(), stride, w.codes.data(), w.scales.data(), w.zeros.data(),
             packing.row_scale ? w.row_scale.data() : nullptr, ordered ? w.perm.data() : nullptr,
             extras ? bias.data() : nullptr, extras ? residual.data() : nullptr, out.data(), m, n, k,
             w.columns, w.group, packing.format, packing.scale_type, packing.zero_type, packing.implicit_zero,
             silu, dtype, block) == 0);
  std::vector<double> weight(n * w.columns), y(n), size(n);
  for (int64_t i = 0; i < n; ++i)
    for (int64_t c = 0; c < w.columns; ++c) weight[i * w.columns + c] = w.at(0, i, c);
  for (int64_t r = 0; r < m; ++r) {
    const std::vector<double> values = quantized<D>(&x(r, 0), w, block);
    for (int64_t i = 0; i < n; ++i) {
      y[i] = extras ? D::get(bias.data()[i]) : 0.0;
      size[i] = std::fabs(y[i]);
      for (int64_t c = 0; c < w.columns; ++c) {
        const double term = weight[i * w.columns + c] * values[c];
        y[i] += term, size[i] += std::fabs(term);
      }
    }
    for (int64_t i = 0; i < width; ++i) {
      double expected = silu ? y[i] / (1 + std::exp(-y[i])) * y[i + width] : y[i];
      double bound =
          silu ? size[i] * (std::fabs(y[i + width]) + 1) + size[i + width] * (std::fabs(y[i]) + 1) : size[i];
      if (extras) expected += D::get(residual.data()[r * width + i]);
      if (dtype == 1 && std::fabs(expected) > 60000) continue;  // near float16's end
      // Only units are added in float32: their sums of codes are exact.
      CHECK(std::fabs(D::get(out(r, i)) - expected) <= 1e-5 + 1e-6 * bound + D::kEps * std::fabs(expected));
    }
  }
}

template <class D>
void all(Call call, int dtype) {
  for (const Packing& p : packings()) {
    if (p.format > 2) continue;
    for (const int64_t block : {0, 32, 128}) {
      for (const int64_t m : {0, 1, 2, 3, 5, 8, 13})
        run<D>(call, dtype, p, block, m, 17, 70, false, m & 1, false);
      for (const int64_t n : {1, 7, 16, 131}) run<D>(call, dtype, p, block, 1, n, 128, false, true, false);
      run<D>(call, dtype, p, block, 7, 150, 600, false, false, false);  // chunks of columns, groups of blocks
      run<D>(call, dtype, p, block, 11, 18, 257, false, true, true);
      run<D>(call, dtype, p, block, 2, 2, 1, false, false, true);
    }
    run<D>(call, dtype, p, 0, 4, 33, 257, true, false, false);
    run<D>(call, dtype, p, 0, 11, 18, 257, true, true, true);
  }
  run<D>(call, dtype, packings()[0], 128, 259, 3, 9, false, true, false);  // two chunks of rows of x
  const auto refused = [&](int64_t n, int64_t k, int64_t columns, int64_t group, int format, int64_t block,
                           const void* perm) {
    return call(nullptr, 0, nullptr, nullptr, nullptr, nullptr, perm, nullptr, nullptr, nullptr, 1, n, k,
                columns, group, format, 2, -1, 0, 0, dtype, block);
  };
  CHECK(refused(0, 16, 16, 16, 0, 16, nullptr) == -2);
  CHECK(refused(4, 33, 32, 32, 0, 32, nullptr) == -2);
  CHECK(refused(4, 32, 32, 12, 0, 32, nullptr) == -2);
  CHECK(refused(4, 32, 32, 32, 0, 24, nullptr) == -2);
  CHECK(refused(4, 64, 64, 64, 0, 32, &dtype) == -2);
  CHECK(refused(4, 32, 32, 32, 3, 32, nullptr) == -5);
}

}  // namespace

int main() {
  int ran = 0;
  for (const auto& level : gm_linear_a8_rows16_levels) {
    if (level.call == nullptr || !runs_here(level.name)) continue;
    all<Dtype<0>>(level.call, 0);
    all<Dtype<1>>(level.call, 1);
    all<Dtype<2>>(level.call, 2);
    ++ran;
  }
  CHECK(ran > 0);
  std::printf("linear_a8: %d level(s)\n", ran);
}
