// gm_linear_a8_rows16 under the sanitizers against float64: integer and e2m1 packings, whole rows and blocks
// of x, row counts on both sides of each tile, partial blocks of rows, tails of K, act-order, bias, residual,
// silu_mul, wide and unaligned rows of x, every level.
//
// Planted faults that this program was seen to catch: one line too many in a run
// of int16 sums (saturates), the bound j.k in quantize_row (reads past a row of x),
// x_sums of the next unit in tile (wrong zero), tile_rows without rounding up (rows left out),
// x_sums of the first row of a tile in known_tile (wrong minimum).
#include "calls/linear.h"
#include "packed_weight.h"

struct Options : Rows16Options {
  int64_t block;
};
struct GroupsOptions {
  int64_t bits, group, minimums, block;
};
GM_LEVELS(gm_linear_a8_rows16, (const GmLinearCall&, const Options&));
using Call = decltype(gm_linear_a8_rows16_levels[0].call);
GM_LEVELS(gm_linear_a8_groups16, (const GmLinearCall&, const GroupsOptions&));
using GroupsCall = decltype(gm_linear_a8_groups16_levels[0].call);

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
  const int64_t width = silu ? n / 2 : n, stride = k + (extras ? 3 : 0);
  Buffer<T> x(m, k, stride), out(m, width, width), bias(extras ? n : 0), residual(extras ? m * width : 0);
  for (int64_t r = 0; r < m; ++r)
    for (int64_t c = 0; c < k; ++c) x(r, c) = D::put(r == 2 ? 3.0f : numbers.eighths());
  for (int64_t i = 0; extras && i < n; ++i) bias.data()[i] = D::put(numbers.eighths());
  for (int64_t i = 0; extras && i < m * width; ++i) residual.data()[i] = D::put(numbers.eighths());
  GmLinearCall linear{.x = x.data(),
                      .x_stride = {stride},
                      .bias = extras ? bias.data() : nullptr,
                      .residual = extras ? residual.data() : nullptr,
                      .silu_mul = silu,
                      .n = n,
                      .out = out.data(),
                      .m = m,
                      .k = k,
                      .x_type = dtype};
  w.into(linear.weight, linear.weight_size, linear.weight_type);
  CHECK(call(linear, {w.options(), block}) == 0);
  if (block == 0) block = w.columns;
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
  Numbers numbers;
  for (const bool ordered : {false, true}) {
    PackedWeight w(packings()[1], 1, 4, 32, ordered, numbers);
    GmLinearCall linear{.n = 4, .m = 1, .k = 32, .x_type = dtype};
    w.into(linear.weight, linear.weight_size, linear.weight_type);
    const auto refused = [&](int64_t n, int64_t k, int64_t group, int64_t format, int64_t block) {
      GmLinearCall changed = linear;
      changed.n = n, changed.k = k;
      Options options{w.options(), block};
      options.group = group, options.format = format;
      return call(changed, options);
    };
    if (ordered) {
      CHECK(refused(4, 32, 32, 0, 32) == -2);  // blocks are of consecutive columns
      continue;
    }
    CHECK(refused(0, 32, 32, 0, 16) == -2 && refused(4, 33, 32, 0, 32) == -2 &&
          refused(4, 32, 12, 0, 32) == -2);
    CHECK(refused(4, 32, 32, 0, 24) == -2 && refused(4, 32, 32, 3, 32) == -5);
  }
}

// A weight of cpu_groups16_v1: codes of 4, 5, 6 or 8 bits in buffers of the exact size, int8 scales with a
// factor per `per` groups or float16 scales (per = 0), and the same of offsets, if it has them.
template <class D>
void groups(GroupsCall call, int dtype, int bits, int64_t group, int64_t per, bool offset, int64_t m,
            int64_t n, int64_t k, bool silu) {
  using T = typename D::T;
  Numbers numbers;
  const int64_t blocks = (n + 15) / 16, count = blocks * (k / group) * 16, width = silu ? n / 2 : n;
  const int64_t shared = bits == 5 ? 4 : bits == 6 ? 2 : 0, lines = k / (bits == 8 ? 4 : 8);
  const int64_t all_lines = shared ? lines + lines / shared : lines;
  const int64_t runs = per ? blocks * (k / group / per) * 16 : 0;
  Buffer<uint8_t> codes(blocks * all_lines * 64), scales(count * (per ? 1 : 2)),
      offsets(offset ? count * (per ? 1 : 2) : 0);
  Buffer<float> factors(runs), offset_factors(offset ? runs : 0);
  Buffer<T> x(m, k, k), out(m, width, width);
  for (int64_t i = 0; i < blocks * all_lines * 64; ++i) codes.data()[i] = uint8_t(numbers.word());
  for (int64_t i = 0; i < runs; ++i) factors.data()[i] = 0.125f * float(1 + numbers.below(7));
  for (int64_t i = 0; offset && i < runs; ++i) offset_factors.data()[i] = 0.5f;
  const auto fill = [&](Buffer<uint8_t>& to, bool is_signed) {
    for (int64_t i = 0; i < count; ++i) {
      const int value = int(numbers.below(63)) - (is_signed ? 31 : 0);
      const uint16_t half = Dtype<1>::put(float(value) / 8);
      if (per)
        to.data()[i] = uint8_t(int8_t(value));
      else
        std::memcpy(to.data() + 2 * i, &half, 2);
    }
  };
  fill(scales, !offset);
  if (offset) fill(offsets, false);
  for (int64_t i = 0; i < m * k; ++i) x.data()[i] = D::put(numbers.eighths());
  GmLinearCall linear{
      .x = x.data(),
      .x_stride = {k},
      .weight = {codes.data(), scales.data(), offsets.data(), factors.data(), offset_factors.data()},
      .weight_size = {blocks * all_lines * 64, count, offset ? count : 0, runs, offset ? runs : 0},
      .weight_type = {6, per ? 5 : 1, per ? 5 : 1, 0, 0},
      .silu_mul = silu,
      .n = n,
      .out = out.data(),
      .m = m,
      .k = k,
      .x_type = dtype};
  const GroupsOptions options{bits, group, offset, 32};
  CHECK(call(linear, options) == 0);
  for (int i = 0; i < 5; ++i) {
    ++linear.weight_size[i];
    CHECK(call(linear, options) == -2);
    --linear.weight_size[i];
  }
  linear.weight_type[0] = 5;
  CHECK(call(linear, options) == -1);
  const auto code_at = [&](int64_t row, int64_t c) {
    const uint8_t* block = codes.data() + row / 16 * all_lines * 64;
    const int64_t lane = row % 16;
    if (bits == 8) return int(block[c / 4 * 64 + lane * 4 + c % 4]);
    const int64_t line = c / 8, at = shared ? line / shared * (shared + 1) + line % shared : line;
    const int low = block[at * 64 + lane * 4 + c % 4] >> (c % 8 / 4 * 4) & 15;
    if (!shared) return low;
    const int64_t step = c % (8 * shared) / 4, high_line = line / shared * (shared + 1) + shared;
    const int high =
        block[high_line * 64 + lane * 4 + c % 4] >> ((bits - 4) * step) & ((1 << (bits - 4)) - 1);
    return low | high << 4;
  };
  const auto value_at = [&](Buffer<uint8_t>& of, Buffer<float>& by, int64_t row, int64_t g) {
    const int64_t i = (row / 16 * (k / group) + g) * 16 + row % 16;
    if (per)
      return int8_t(of.data()[i]) *
             double(by.data()[(row / 16 * (k / group / per) + g / per) * 16 + row % 16]);
    uint16_t half;
    std::memcpy(&half, of.data() + 2 * i, 2);
    return double(Dtype<1>::get(half));
  };
  for (int64_t r = 0; r < m; ++r) {
    std::vector<double> values(k);
    for (int64_t c0 = 0; c0 < k; c0 += 32) {
      float amax = 1e-10f;
      for (int64_t c = c0; c < c0 + 32; ++c) amax = std::fmax(amax, std::fabs(D::get(x(r, c))));
      const float scale = amax / 127.0f;
      for (int64_t c = c0; c < c0 + 32; ++c)
        values[c] = double(std::nearbyint(D::get(x(r, c)) / scale)) * scale;
    }
    std::vector<double> y(n), size(n);
    for (int64_t i = 0; i < n; ++i)
      for (int64_t c = 0; c < k; ++c) {
        double w = (code_at(i, c) - (offset ? 0 : 1 << (bits - 1))) * value_at(scales, factors, i, c / group);
        if (offset) w -= value_at(offsets, offset_factors, i, c / group);
        y[i] += w * values[c], size[i] += std::fabs(w * values[c]);
      }
    for (int64_t i = 0; i < width; ++i) {
      const double expected = silu ? y[i] / (1 + std::exp(-y[i])) * y[i + width] : y[i];
      const double bound =
          silu ? size[i] * (std::fabs(y[i + width]) + 1) + size[i + width] * (std::fabs(y[i]) + 1) : size[i];
      if (dtype == 1 && std::fabs(expected) > 60000) continue;  // near float16's end
      CHECK(std::fabs(D::get(out(r, i)) - expected) <= 1e-5 + 2e-6 * bound + D::kEps * std::fabs(expected));
    }
  }
}

template <class D>
void all_groups(GroupsCall call, int dtype) {
  for (const int bits : {4, 5, 6, 8})
    for (const int64_t m : {1, 3, 13}) {
      groups<D>(call, dtype, bits, 32, 8, bits == 4, m, 17, 512, false);
      groups<D>(call, dtype, bits, 32, 0, bits != 8, m, 33, 96, false);
      groups<D>(call, dtype, bits, 32, 8, bits == 5, m, 34, 256, true);
      groups<D>(call, dtype, bits, 32, 0, false, m, 18, 352, false);  // half: float16 scales alone
      if (bits != 5) groups<D>(call, dtype, bits, 16, 16, false, m, 7, 256, false);
    }
  const auto refused = [&](int64_t k, int64_t group, int64_t bits) {
    const GmLinearCall linear{.weight_size = {k * bits * 2, k / group * 16, 0, k / 256 * 16},
                              .weight_type = {6, 5, 5, 0, 0},
                              .n = 4,
                              .m = 1,
                              .k = k,
                              .x_type = dtype};
    return call(linear, {bits, group, false, 32});
  };
  CHECK(refused(512, 32, 3) == -5);
  CHECK(refused(512, 96, 4) == -2 && refused(96, 32, 4) == -2 && refused(500, 32, 4) == -2);
}

}  // namespace

int main() {
  int ran = 0;
  for (const auto& level : gm_linear_a8_groups16_levels) {
    if (level.call == nullptr || !runs_here(level.name)) continue;
    all_groups<Dtype<0>>(level.call, 0);
    all_groups<Dtype<1>>(level.call, 1);
    all_groups<Dtype<2>>(level.call, 2);
  }
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
