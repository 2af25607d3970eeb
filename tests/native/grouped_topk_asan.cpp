// gm_grouped_topk under the sanitizers: every group shape, tails, strides, NaN logits; ids stay different and in range.
#include "asan.h"

GM_LEVELS(gm_grouped_topk, (const void*, int64_t, const float*, float*, int32_t*, int64_t, int64_t, int64_t, int64_t, int64_t, int,
                            int, float, int));

int main() {
  int ran = 0;
  const struct { int64_t experts, top_k, groups, kept; } shapes[] = {{1, 1, 1, 1},    {7, 3, 1, 1},     {16, 2, 8, 2}, {33, 33, 1, 1},
                                                                     {12, 3, 12, 5}, {256, 8, 8, 4}, {512, 22, 1, 1}, {4096, 9, 64, 1}};
  for (const auto& level : gm_grouped_topk_levels) {
    if (level.call == nullptr || !runs_here(level.name)) continue;
    for (const auto& s : shapes)
      for (int64_t rows : {0, 1, 3})
        for (int mode = 0; mode < 8; ++mode) {
          const bool nan = mode & 4;
          Buffer<float> logits(rows, s.experts, s.experts + 3), bias(s.experts), weights(rows * s.top_k);
          Buffer<int32_t> ids(rows * s.top_k);
          for (int64_t r = 0; r < rows; ++r)
            for (int64_t e = 0; e < s.experts; ++e) logits(r, e) = nan && e % 2 ? __builtin_nanf("") : float((e * 37 + r) % 11) - 5;
          CHECK(level.call(logits.data(), s.experts + 3, mode & 1 ? bias.data() : nullptr, weights.data(), ids.data(), rows,
                           s.experts, s.top_k, s.groups, s.kept, mode & 2, 1, 1.0f, 0) == 0);
          for (int64_t r = 0; r < rows; ++r)
            for (int64_t i = 0; i < s.top_k; ++i) {
              const int32_t id = ids(0, r * s.top_k + i);
              CHECK(id >= 0 && id < s.experts);
              for (int64_t j = 0; j < i; ++j) CHECK(ids(0, r * s.top_k + j) != id);
            }
        }
    CHECK(level.call(nullptr, 0, nullptr, nullptr, nullptr, 1, 5000, 1, 1, 1, 0, 0, 1.0f, 0) == -2);
    CHECK(level.call(nullptr, 0, nullptr, nullptr, nullptr, 1, 16, 5, 8, 2, 0, 0, 1.0f, 0) == -2);
    ++ran;
  }
  CHECK(ran > 0);
  std::printf("grouped_topk: %d level(s)\n", ran);
}
