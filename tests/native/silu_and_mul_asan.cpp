// gm_silu_and_mul under the sanitizers against float64: odd and tail-only widths, wide strides, empty input,
// every dtype and level.
#include "asan.h"
#include "asan_values.h"
#include "calls/silu_and_mul.h"

GM_LEVELS(gm_silu_and_mul, (const GmSiluAndMulCall&));
struct Call {  // by position
  decltype(gm_silu_and_mul_levels[0].call) entry;
  int operator()(const void* x, int64_t x_stride, void* out, int64_t out_stride, int64_t m, int64_t n,
                 int type) const {
    const GmSiluAndMulCall call{.x = x,
                                .x_stride = {x_stride},
                                .out = out,
                                .out_stride = {out_stride},
                                .m = m,
                                .n = n,
                                .x_type = type};
    return entry(call);
  }
};

template <class D>
void run(Call call, int dtype, int64_t rows, int64_t cols, int64_t pad) {
  using T = typename D::T;
  Numbers numbers;
  Buffer<T> x(rows, 2 * cols, 2 * cols + pad), out(rows, cols, cols + 2 * pad);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < 2 * cols; ++c) x(r, c) = D::put(numbers.eighths() * (c == 3 ? 32 : 1));
  CHECK(call(x.data(), 2 * cols + pad, out.data(), cols + 2 * pad, rows, cols, dtype) == 0);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c) {
      const double gate = D::get(x(r, c)), wanted = gate / (1 + std::exp(-gate)) * D::get(x(r, cols + c));
      // 1e-7: float16 keeps fewer bits of what is below its normal range.
      CHECK(std::fabs(D::get(out(r, c)) - wanted) <= (D::kEps + 1e-6) * std::fabs(wanted) + 1e-7);
    }
}

template <class D>
void all(Call call, int dtype) {
  for (int64_t cols : {1, 3, 7, 8, 15, 16, 17, 31, 33, 64, 257})
    for (int64_t rows : {0, 1, 5})
      for (int64_t pad : {0, 3}) run<D>(call, dtype, rows, cols, pad);
  CHECK(call(nullptr, 0, nullptr, 0, 0, 4, 99) == -1);
  CHECK(call(nullptr, 0, nullptr, 0, 1, 0, dtype) == -2);
}

int main() {
  int ran = 0;
  for (const auto& level : gm_silu_and_mul_levels) {
    if (level.call == nullptr || !runs_here(level.name)) continue;
    all<Dtype<0>>(Call{level.call}, 0), all<Dtype<1>>(Call{level.call}, 1),
        all<Dtype<2>>(Call{level.call}, 2);
    ++ran;
  }
  CHECK(ran > 0);
  std::printf("silu_and_mul: %d level(s)\n", ran);
}
