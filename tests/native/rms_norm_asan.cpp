// gm_rms_norm under the sanitizers against float64: odd and tail-only widths, wide strides, empty input,
// unaligned rows, every dtype and level.
//
// Planted faults that this program must catch, built by tests/native/test_sanitizers.py: the tail of a row
// read or written whole, a row too many, a shift past the width of its type, a wrong factor.
#include "asan.h"
#include "asan_values.h"
#include "calls/rms_norm.h"

GM_LEVELS(gm_rms_norm, (const GmRmsNormCall&));
struct Call {  // by position
  decltype(gm_rms_norm_levels[0].call) entry;
  int operator()(const void* x, int64_t x_stride, const void* weight, void* out, int64_t out_stride,
                 int64_t m, int64_t n, float eps, int type, int w_type = -1) const {
    const GmRmsNormCall call{.x = x,
                             .x_stride = {x_stride},
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
  Buffer<T> x(rows, cols, cols + pad), w(cols), out(rows, cols, cols + 2 * pad);
  Buffer<float> wide_w(cols);
  for (int64_t c = 0; c < cols; ++c) w(0, c) = D::put(wide_w(0, c) = numbers.eighths());
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c) x(r, c) = D::put(numbers.eighths());
  const void* weight = wide ? static_cast<const void*>(wide_w.data()) : w.data();
  CHECK(call(x.data(), cols + pad, weight, out.data(), cols + 2 * pad, rows, cols, 0.25f, dtype,
             wide ? 0 : -1) == 0);
  for (int64_t r = 0; r < rows; ++r) {
    double squares = 0;
    for (int64_t c = 0; c < cols; ++c) squares += double(D::get(x(r, c))) * D::get(x(r, c));
    for (int64_t c = 0; c < cols; ++c) {
      const double wanted = D::get(x(r, c)) / std::sqrt(squares / cols + 0.25) * D::get(w(0, c));
      CHECK(std::fabs(D::get(out(r, c)) - wanted) <= (D::kEps + 1e-6) * std::fabs(wanted));
    }
  }
}

template <class D>
void all(Call call, int dtype) {
  for (int64_t cols : {1, 3, 7, 8, 15, 16, 17, 31, 33, 64, 257, 1000})
    for (int64_t rows : {0, 1, 5})
      for (int64_t pad : {0, 3})
        for (bool wide : {false, true}) run<D>(call, dtype, rows, cols, pad, wide);
  CHECK(call(nullptr, 0, nullptr, nullptr, 0, 0, 4, 0.0f, 99) == -1);
  CHECK(call(nullptr, 0, nullptr, nullptr, 0, 1, 0, 0.0f, dtype) == -2);
}

int main() {
  int ran = 0;
  for (const auto& level : gm_rms_norm_levels) {
    if (level.call == nullptr || !runs_here(level.name)) continue;
    all<Dtype<0>>(Call{level.call}, 0), all<Dtype<1>>(Call{level.call}, 1),
        all<Dtype<2>>(Call{level.call}, 2);
    ++ran;
  }
  CHECK(ran > 0);
  std::printf("rms_norm: %d level(s)\n", ran);
}
