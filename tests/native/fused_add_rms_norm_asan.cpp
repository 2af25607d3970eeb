// gm_fused_add_rms_norm under the sanitizers against float64: odd and tail-only widths, wide strides, empty
// input, every dtype and level.
#include "asan.h"
#include "asan_values.h"
#include "calls/fused_add_rms_norm.h"

#include <vector>

GM_LEVELS(gm_fused_add_rms_norm, (const GmFusedAddRmsNormCall&));
struct Call {  // by position
  decltype(gm_fused_add_rms_norm_levels[0].call) entry;
  int operator()(const void* x, int64_t x_stride, void* residual, int64_t residual_stride, const void* weight,
                 void* out, int64_t out_stride, int64_t m, int64_t n, float eps, int type,
                 int w_type = -1) const {
    const GmFusedAddRmsNormCall call{.x = x,
                                     .x_stride = {x_stride},
                                     .residual = residual,
                                     .residual_stride = {residual_stride},
                                     .weight = weight,
                                     .eps = eps,
                                     .out = out,
                                     .out_stride = {out_stride},
                                     .m = m,
                                     .n = n,
                                     .x_type = type,
                                     .w_type = w_type < 0 ? type : w_type};
    return entry(call);
  }
};

template <class D>
void run(Call call, int dtype, int64_t rows, int64_t cols, int64_t pad, bool wide) {
  using T = typename D::T;
  Numbers numbers;
  Buffer<T> x(rows, cols, cols + pad), residual(rows, cols, cols + 3 * pad), w(cols),
      out(rows, cols, cols + 2 * pad);
  std::vector<double> sum(rows * cols);  // of eighths up to 4: every storage type holds it
  Buffer<float> wide_w(cols);
  for (int64_t c = 0; c < cols; ++c) w(0, c) = D::put(wide_w(0, c) = numbers.eighths());
  const void* weight = wide ? static_cast<const void*>(wide_w.data()) : w.data();
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c) {
      x(r, c) = D::put(numbers.eighths()), residual(r, c) = D::put(numbers.eighths());
      sum[r * cols + c] = D::get(x(r, c)) + D::get(residual(r, c));
    }
  CHECK(call(x.data(), cols + pad, residual.data(), cols + 3 * pad, weight, out.data(), cols + 2 * pad, rows,
             cols, 0.25f, dtype, wide ? 0 : -1) == 0);
  for (int64_t r = 0; r < rows; ++r) {
    double squares = 0;
    for (int64_t c = 0; c < cols; ++c) squares += sum[r * cols + c] * sum[r * cols + c];
    for (int64_t c = 0; c < cols; ++c) {
      CHECK(D::get(residual(r, c)) == sum[r * cols + c]);
      const double wanted = sum[r * cols + c] / std::sqrt(squares / cols + 0.25) * D::get(w(0, c));
      CHECK(std::fabs(D::get(out(r, c)) - wanted) <= (D::kEps + 1e-6) * std::fabs(wanted));
    }
  }
}

template <class D>
void all(Call call, int dtype) {
  for (int64_t cols : {1, 3, 7, 8, 15, 16, 17, 31, 33, 64, 257})
    for (int64_t rows : {0, 1, 5})
      for (int64_t pad : {0, 3})
        for (bool wide : {false, true}) run<D>(call, dtype, rows, cols, pad, wide);
  CHECK(call(nullptr, 0, nullptr, 0, nullptr, nullptr, 0, 0, 4, 0.0f, 99) == -1);
  CHECK(call(nullptr, 0, nullptr, 0, nullptr, nullptr, 0, 1, 0, 0.0f, dtype) == -2);
}

int main() {
  int ran = 0;
  for (const auto& level : gm_fused_add_rms_norm_levels) {
    if (level.call == nullptr || !runs_here(level.name)) continue;
    all<Dtype<0>>(Call{level.call}, 0), all<Dtype<1>>(Call{level.call}, 1),
        all<Dtype<2>>(Call{level.call}, 2);
    ++ran;
  }
  CHECK(ran > 0);
  std::printf("fused_add_rms_norm: %d level(s)\n", ran);
}
