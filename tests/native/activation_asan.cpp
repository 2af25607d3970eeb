// gm_activation and gm_gelu_and_mul under the sanitizers against float64: odd and tail-only widths, wide strides, empty
// input, every function, dtype and level.
#include "asan.h"
#include "asan_values.h"
#include "calls/activation.h"
#include "calls/gelu_and_mul.h"

GM_LEVELS(gm_activation, (const GmActivationCall&));
GM_LEVELS(gm_gelu_and_mul, (const GmGeluAndMulCall&));

double gelu(double x) { return x * std::erfc(-x * std::sqrt(0.5)) / 2; }
double gelu_tanh(double x) {
  return x / (1 + std::exp(-2 * std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}
double wanted(int function, double x) {
  if (function == 0) return gelu(x);
  if (function == 1) return gelu_tanh(x);
  if (function == 2) return x / (1 + std::exp(-x));
  const double positive = x > 0 ? x : 0;
  return function == 3 ? positive : positive * positive;
}

// 1e-7: float16 keeps fewer bits of what is below its normal range.
template <class D>
void check(typename D::T value, double expected) {
  CHECK(std::fabs(D::get(value) - expected) <= (D::kEps + 4e-6) * std::fabs(expected) + 1e-7);
}

template <class D, class Entry>
void run(Entry entry, int dtype, int64_t rows, int64_t cols, int64_t pad, int function) {
  Numbers numbers;
  Buffer<typename D::T> x(rows, cols, cols + pad), out(rows, cols, cols + 2 * pad);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c) x(r, c) = D::put(numbers.eighths());
  const GmActivationCall call{.x = x.data(),
                              .x_stride = {cols + pad},
                              .function = GmActivationCall::Function(function),
                              .out = out.data(),
                              .out_stride = {cols + 2 * pad},
                              .m = rows,
                              .n = cols,
                              .x_type = dtype};
  CHECK(entry(call) == 0);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c) check<D>(out(r, c), wanted(function, D::get(x(r, c))));
}

template <class D, class Entry>
void run_gated(Entry entry, int dtype, int64_t rows, int64_t cols, int64_t pad, bool tanh) {
  using Approximate = GmGeluAndMulCall::Approximate;
  Numbers numbers;
  Buffer<typename D::T> x(rows, 2 * cols, 2 * cols + pad), out(rows, cols, cols + 2 * pad);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < 2 * cols; ++c) x(r, c) = D::put(numbers.eighths());
  const GmGeluAndMulCall call{.x = x.data(),
                              .x_stride = {2 * cols + pad},
                              .approximate = tanh ? Approximate::tanh : Approximate::none,
                              .out = out.data(),
                              .out_stride = {cols + 2 * pad},
                              .m = rows,
                              .n = cols,
                              .x_type = dtype};
  CHECK(entry(call) == 0);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c)
      check<D>(out(r, c), wanted(tanh, D::get(x(r, c))) * D::get(x(r, cols + c)));
}

template <class D, class Entry, class Gated>
void all(Entry entry, Gated gated, int dtype) {
  for (int64_t cols : {1, 3, 7, 8, 15, 16, 17, 31, 33, 64, 257})
    for (int64_t rows : {0, 1, 5})
      for (int64_t pad : {0, 3}) {
        for (int function = 0; function < 5; ++function) run<D>(entry, dtype, rows, cols, pad, function);
        for (bool tanh : {false, true}) run_gated<D>(gated, dtype, rows, cols, pad, tanh);
      }
  CHECK(entry({.n = 4, .x_type = 99}) == -1 && gated({.n = 4, .x_type = 99}) == -1);
  CHECK(entry({.m = 1, .x_type = dtype}) == -2 && gated({.m = 1, .x_type = dtype}) == -2);
}

int main() {
  int ran = 0;
  const size_t levels = sizeof gm_activation_levels / sizeof gm_activation_levels[0];
  for (size_t i = 0; i < levels; ++i) {
    const auto& level = gm_activation_levels[i];
    const auto& gated = gm_gelu_and_mul_levels[i];
    if (level.call == nullptr || !runs_here(level.name) || !runs_here(gated.name)) continue;
    all<Dtype<0>>(level.call, gated.call, 0), all<Dtype<1>>(level.call, gated.call, 1),
        all<Dtype<2>>(level.call, gated.call, 2);
    ++ran;
  }
  CHECK(ran > 0);
  std::printf("activation: %d level(s)\n", ran);
}
