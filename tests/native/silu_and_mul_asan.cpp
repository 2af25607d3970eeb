// gm_silu_and_mul under the sanitizers: odd and tail-only widths, wide strides, empty input, every dtype and level.
#include "asan.h"

GM_LEVELS(gm_silu_and_mul, (const void*, int64_t, void*, int64_t, int64_t, int64_t, int));

// silu(100) = 100 in every dtype, so that 100 * 1 must come out.
template <class T, class Call>
void run(Call call, int dtype, T one, T hundred) {
  for (int64_t cols : {1, 3, 7, 8, 15, 16, 17, 31, 33, 64, 257})
    for (int64_t rows : {0, 1, 5})
      for (int64_t pad : {0, 3}) {
        Buffer<T> x(rows, 2 * cols, 2 * cols + pad), out(rows, cols, cols + 2 * pad);
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t c = 0; c < 2 * cols; ++c) x(r, c) = c < cols ? hundred : one;
        CHECK(call(x.data(), 2 * cols + pad, out.data(), cols + 2 * pad, rows, cols, dtype) == 0);
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t c = 0; c < cols; ++c) CHECK(out(r, c) == hundred);
      }
  CHECK(call(nullptr, 0, nullptr, 0, 0, 4, 99) == -1);
  CHECK(call(nullptr, 0, nullptr, 0, 1, 0, dtype) == -2);
}

int main() {
  int ran = 0;
  for (const auto& level : gm_silu_and_mul_levels) {
    if (level.call == nullptr || !runs_here(level.name)) continue;
    run<float>(level.call, 0, 1.0f, 100.0f);
    run<uint16_t>(level.call, 1, 0x3c00, 0x5640);
    run<uint16_t>(level.call, 2, 0x3f80, 0x42c8);
    ++ran;
  }
  CHECK(ran > 0);
  std::printf("silu_and_mul: %d level(s)\n", ran);
}
