// gm_sample under the sanitizers: tails, strides, every filter alone and together, rows without an answer.
#include "asan.h"

GM_LEVELS(gm_sample, (const void*, int64_t, const float*, const int32_t*, const float*, const float*, const int64_t*, const int64_t*,
                      int64_t*, int64_t, int64_t, int));

int main() {
  int ran = 0;
  for (const auto& level : gm_sample_levels) {
    if (level.call == nullptr || !runs_here(level.name)) continue;
    for (int64_t n : {1, 2, 7, 15, 16, 17, 33, 257, 1000})
      for (int kind = 0; kind < 4; ++kind) {
        constexpr int64_t rows = 12;
        Buffer<float> logits(rows, n, n + 5), temperature(rows), top_p(rows), min_p(rows);
        Buffer<int32_t> top_k(rows);
        Buffer<int64_t> seed(rows), index(rows), ids(rows);
        for (int64_t r = 0; r < rows; ++r) {
          const float fill = kind == 1 ? -__builtin_inff() : kind == 2 ? __builtin_nanf("") : 0.0f;
          for (int64_t c = 0; c < n; ++c) logits(r, c) = kind == 0 ? float((c * 31 + r * 7) % 13) - 6 : fill;
          temperature(0, r) = r % 4 == 0 ? 0.0f : 0.25f * float(r);
          top_k(0, r) = int32_t(r % 3 == 0 ? 0 : r);
          top_p(0, r) = r % 2 ? 0.1f * float(r % 10) : 1.0f;
          min_p(0, r) = r % 5 ? 0.0f : 0.2f;
          seed(0, r) = -r * 1234567890123LL;
          index(0, r) = r << 33;
        }
        CHECK(level.call(logits.data(), n + 5, temperature.data(), top_k.data(), top_p.data(), min_p.data(), seed.data(), index.data(),
                         ids.data(), rows, n, 0) == 0);
        for (int64_t r = 0; r < rows; ++r) CHECK(kind == 1 || kind == 2 ? ids(0, r) == -1 : ids(0, r) >= 0 && ids(0, r) < n);
      }
    CHECK(level.call(nullptr, 0, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, 1, 0, 0) == -2);
    ++ran;
  }
  CHECK(ran > 0);
  std::printf("sample: %d level(s)\n", ran);
}
