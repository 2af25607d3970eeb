// gm_fused_add_rms_norm under the sanitizers: odd and tail-only widths, wide strides, empty input, every dtype and level.
#include "asan.h"

GM_LEVELS(gm_fused_add_rms_norm,
          (const void*, int64_t, void*, int64_t, const void*, void*, int64_t, int64_t, int64_t, float, int));

template <class T, class Call>
void run(Call call, int dtype, T one) {
  for (int64_t cols : {1, 3, 7, 8, 15, 16, 17, 31, 33, 64, 257})
    for (int64_t rows : {0, 1, 5})
      for (int64_t pad : {0, 3}) {
        Buffer<T> x(rows, cols, cols + pad), residual(rows, cols, cols + pad), w(cols), out(rows, cols, cols + 2 * pad);
        for (int64_t c = 0; c < cols; ++c) w(0, c) = one;
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t c = 0; c < cols; ++c) residual(r, c) = one;  // x is zero
        CHECK(call(x.data(), cols + pad, residual.data(), cols + pad, w.data(), out.data(), cols + 2 * pad, rows, cols, 0.0f,
                   dtype) == 0);
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t c = 0; c < cols; ++c) CHECK(out(r, c) == one && residual(r, c) == one);
      }
  CHECK(call(nullptr, 0, nullptr, 0, nullptr, nullptr, 0, 0, 4, 0.0f, 99) == -1);
  CHECK(call(nullptr, 0, nullptr, 0, nullptr, nullptr, 0, 1, 0, 0.0f, dtype) == -2);
}

int main() {
  int ran = 0;
  for (const auto& level : gm_fused_add_rms_norm_levels) {
    if (level.call == nullptr || !runs_here(level.name)) continue;
    run<float>(level.call, 0, 1.0f);
    run<uint16_t>(level.call, 1, 0x3c00);
    run<uint16_t>(level.call, 2, 0x3f80);
    ++ran;
  }
  CHECK(ran > 0);
  std::printf("fused_add_rms_norm: %d level(s)\n", ran);
}
