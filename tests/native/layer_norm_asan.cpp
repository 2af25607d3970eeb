// gm_layer_norm under the sanitizers against float64: odd and tail-only widths, wide strides, empty input, with and without
// a bias and a residual, every dtype and level.
#include "asan.h"
#include "asan_values.h"
#include "calls/layer_norm.h"

#include <vector>

GM_LEVELS(gm_layer_norm, (const GmLayerNormCall&));
struct Call {  // by position
  decltype(gm_layer_norm_levels[0].call) entry;
  int operator()(const void* x, int64_t x_stride, const void* weight, const void* bias, void* residual,
                 int64_t residual_stride, void* out, int64_t out_stride, int64_t m, int64_t n,
                 int type) const {
    const GmLayerNormCall call{.x = x,
                               .x_stride = {x_stride},
                               .weight = weight,
                               .bias = bias,
                               .eps = 0.25,
                               .residual = residual,
                               .residual_stride = {residual_stride},
                               .out = out,
                               .out_stride = {out_stride},
                               .m = m,
                               .n = n,
                               .x_type = type};
    return entry(call);
  }
};

template <class D>
void run(Call call, int dtype, int64_t rows, int64_t cols, int64_t pad, bool biased, bool added) {
  using T = typename D::T;
  Numbers numbers;
  Buffer<T> x(rows, cols, cols + pad), residual(rows, cols, cols + 3 * pad), w(cols), b(cols),
      out(rows, cols, cols + 2 * pad);
  std::vector<double> sum(rows * cols);  // of eighths up to 4: every storage type holds it
  for (int64_t c = 0; c < cols; ++c) w(0, c) = D::put(numbers.eighths()), b(0, c) = D::put(numbers.eighths());
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c) {
      x(r, c) = D::put(numbers.eighths()), residual(r, c) = D::put(numbers.eighths());
      sum[r * cols + c] = D::get(x(r, c)) + (added ? D::get(residual(r, c)) : 0);
    }
  CHECK(call(x.data(), cols + pad, w.data(), biased ? b.data() : nullptr, added ? residual.data() : nullptr,
             cols + 3 * pad, out.data(), cols + 2 * pad, rows, cols, dtype) == 0);
  for (int64_t r = 0; r < rows; ++r) {
    double mean = 0, squares = 0;
    for (int64_t c = 0; c < cols; ++c) mean += sum[r * cols + c] / cols;
    for (int64_t c = 0; c < cols; ++c) squares += (sum[r * cols + c] - mean) * (sum[r * cols + c] - mean);
    for (int64_t c = 0; c < cols; ++c) {
      if (added) CHECK(D::get(residual(r, c)) == sum[r * cols + c]);
      const double scaled = (sum[r * cols + c] - mean) / std::sqrt(squares / cols + 0.25) * D::get(w(0, c));
      const double wanted = scaled + (biased ? D::get(b(0, c)) : 0);
      CHECK(std::fabs(D::get(out(r, c)) - wanted) <=
            D::kEps * std::fabs(wanted) + 4e-6 * (1 + std::fabs(scaled)));
    }
  }
}

template <class D>
void all(Call call, int dtype) {
  for (int64_t cols : {1, 3, 7, 8, 15, 16, 17, 31, 33, 64, 257})
    for (int64_t rows : {0, 1, 5})
      for (int64_t pad : {0, 3})
        for (int form = 0; form < 4; ++form) run<D>(call, dtype, rows, cols, pad, form & 1, form & 2);
  CHECK(call(nullptr, 0, nullptr, nullptr, nullptr, 0, nullptr, 0, 0, 4, 99) == -1);
  CHECK(call(nullptr, 0, nullptr, nullptr, nullptr, 0, nullptr, 0, 1, 0, dtype) == -2);
}

int main() {
  int ran = 0;
  for (const auto& level : gm_layer_norm_levels) {
    if (level.call == nullptr || !runs_here(level.name)) continue;
    all<Dtype<0>>(Call{level.call}, 0), all<Dtype<1>>(Call{level.call}, 1),
        all<Dtype<2>>(Call{level.call}, 2);
    ++ran;
  }
  CHECK(ran > 0);
  std::printf("layer_norm: %d level(s)\n", ran);
}
