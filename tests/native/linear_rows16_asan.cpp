// gm_linear_rows16 under the sanitizers: every format, scale and zero type, odd N, row counts of every path, act-order,
// epilogues, every dtype and level. Weights, x and scales are ones, so that each output is exactly K (and what is added).
#include <cmath>
#include <cstring>
#include <vector>

#include "asan.h"

GM_LEVELS(gm_linear_rows16,
          (const void*, int64_t, const void*, const void*, const void*, const void*, const void*, const void*, const void*, void*,
           int64_t, int64_t, int64_t, int64_t, int64_t, int, int, int, int, int, int));

// A small non-negative integer in float, half or bfloat16.
template <class T> T number(int dtype, int value) {
  const float f = float(value);
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if (dtype == 2) bits >>= 16;
  if (dtype == 1) bits = value ? uint32_t((bits >> 13) - ((127 - 15) << 10)) : 0;
  T out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

struct Case { int format, bits, group, scale, zero, implicit; uint32_t word; };

template <class T, class Call>
void run(Call call, int dtype) {
  const Case cases[] = {
      {0, 4, 32, 2, -1, 8, 0x99999999u}, {0, 4, 128, 1, 6, 0, 0x99999999u}, {0, 4, 0, 0, 0, 0, 0x99999999u},
      {1, 4, 32, 20, -1, 0, 0x22222222u}, {1, 4, 16, 3, -1, 0, 0x22222222u}, {2, 8, 0, 2, -1, 128, 0x81818181u},
      {2, 8, 128, 2, -1, 128, 0x81818181u}, {3, 8, 128, 0, -1, 0, 0x38383838u}, {3, 8, 32, 20, -1, 0, 0x38383838u},
      {4, 32, 0, -1, -1, 0, 0x3f800000u}, {5, 16, 0, -1, -1, 0, 0x3c003c00u}, {6, 16, 0, -1, -1, 0, 0x3f803f80u},
  };
  const int64_t scale_bytes[] = {4, 2, 2, 1};
  for (const Case& c : cases)
    for (int64_t n : {1, 16, 34})
      for (int64_t k : {1, 33, 160})
        for (int64_t m : {0, 1, 2, 3, 7, 9, 21}) {
          const int64_t unit = c.group ? c.group : 32, columns = (k + unit - 1) / unit * unit, group = c.group ? c.group : columns;
          const int64_t blocks = (n + 15) / 16, groups = columns / group;
          const bool ordered = k == 33, silu = n % 2 == 0 && m == 3;
          std::vector<uint32_t> codes(size_t(blocks * columns * c.bits / 2), c.word);
          const int64_t width = c.scale == 20 ? 1 : c.scale < 0 ? 0 : scale_bytes[c.scale];
          std::vector<uint8_t> scales(size_t(blocks * groups * 16 * width));
          for (size_t i = 0; i < scales.size(); i += size_t(width)) {
            const float f = 1.0f;
            const uint16_t half = 0x3c00, brain = 0x3f80;
            const uint8_t byte = c.scale == 20 ? 127 : 0x38;
            std::memcpy(&scales[i], c.scale == 0 ? (const void*)&f : c.scale == 1 ? &half : c.scale == 2 ? (const void*)&brain : &byte,
                        size_t(width));
          }
          std::vector<float> float_zeros(c.zero == 0 ? size_t(blocks * groups * 16) : 0, 8.0f);
          std::vector<uint8_t> zeros(c.zero == 6 ? size_t(blocks * groups * 16) : 0, 8);
          std::vector<float> row_scale(size_t(blocks * 16), 1.0f);
          std::vector<int32_t> perm(ordered ? size_t(columns) : 0);
          for (int64_t i = 0; i < int64_t(perm.size()); ++i) perm[size_t(i)] = i < k ? int32_t(k - 1 - i) : -1;
          const int64_t columns_out = silu ? n / 2 : n;
          Buffer<T> x(m, k, k + 3), bias(n), residual(m, columns_out, columns_out), out(m, columns_out, columns_out);
          for (int64_t r = 0; r < m; ++r)
            for (int64_t i = 0; i < k; ++i) x(r, i) = number<T>(dtype, 1);
          for (int64_t i = 0; i < n; ++i) bias(0, i) = number<T>(dtype, 2);
          for (int64_t r = 0; r < m; ++r)
            for (int64_t i = 0; i < columns_out; ++i) residual(r, i) = number<T>(dtype, 1);
          const void* stored = c.zero == 0 ? (const void*)float_zeros.data() : zeros.data();
          CHECK(call(x.data(), k + 3, codes.data(), scales.data(), stored, row_scale.data(), ordered ? perm.data() : nullptr,
                     bias.data(), residual.data(), out.data(), m, n, k, columns, group, c.format, c.scale, c.zero, c.implicit, silu,
                     dtype) == 0);
          if (silu) continue;
          for (int64_t r = 0; r < m; ++r)
            for (int64_t i = 0; i < n; ++i) CHECK(out(r, i) == number<T>(dtype, int(k) + 3));
        }
  CHECK(call(nullptr, 0, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, 0, 1, 32, 32, 32, 0, 2, -1, 8, 0, dtype) == 0);
  CHECK(call(nullptr, 0, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, 1, 1, 33, 32, 32, 0, 2, -1, 8, 0, dtype) == -2);
  CHECK(call(nullptr, 0, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, 1, 1, 32, 32, 32, 0, 2, -1, 8, 0, 99) == -1);
  CHECK(call(nullptr, 0, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, 1, 1, 32, 32, 32, 7, 2, -1, 8, 0, dtype) == -5);
}

int main() {
  int ran = 0;
  for (const auto& level : gm_linear_rows16_levels) {
    if (level.call == nullptr || !runs_here(level.name)) continue;
    run<float>(level.call, 0);
    run<uint16_t>(level.call, 1);
    run<uint16_t>(level.call, 2);
    ++ran;
  }
  CHECK(ran > 0);
  std::printf("linear_rows16: %d level(s)\n", ran);
}
