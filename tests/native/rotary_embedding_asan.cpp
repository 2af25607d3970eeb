// gm_rotary_embedding under the sanitizers: odd halves, one head and several, no k, positions outside the table, every level.
#include "asan.h"

GM_LEVELS(gm_rotary_embedding, (void*, int64_t, int64_t, int64_t, void*, int64_t, int64_t, int64_t, const int64_t*, const float*,
                                int64_t, int64_t, int64_t, int, int));

// The table holds cos 0 and sin 1: a pair (a, b) becomes (-b, a). Position 9 is outside it and becomes NaN.
template <class T, class Call>
void run(Call call, int dtype, T one, T minus_one, T two, T nan_bits, bool floats) {
  for (int64_t rot : {2, 6, 14, 16, 30, 32, 34, 66})
    for (int64_t heads : {1, 3})
      for (int interleaved : {0, 1})
        for (int64_t pad : {0, 3}) {
          const int64_t tokens = 2, size = rot + pad, half = rot / 2;
          Buffer<T> q(tokens * heads, rot, size), k(tokens, rot, size);
          Buffer<float> table(2, rot, rot);
          Buffer<int64_t> positions(tokens);
          positions.data()[0] = 1;
          positions.data()[1] = 9;
          for (int64_t i = half; i < rot; ++i) table(0, i) = table(1, i) = 1.0f;
          for (int64_t r = 0; r < tokens * heads; ++r)
            for (int64_t i = 0; i < rot; ++i) {
              const bool first = interleaved ? i % 2 == 0 : i < half;
              q(r, i) = first ? two : one;
              if (r < tokens) k(r, i) = first ? two : one;
            }
          CHECK(call(q.data(), heads * size, size, heads, k.data(), size, size, 1, positions.data(), table.data(), 2, tokens, rot,
                     interleaved, dtype) == 0);
          for (int64_t h = 0; h < heads; ++h)
            for (int64_t i = 0; i < rot; ++i) {
              const bool first = interleaved ? i % 2 == 0 : i < half;
              CHECK(q(h, i) == (first ? minus_one : two));
              CHECK(k(0, i) == (first ? minus_one : two));
              const T lost = q(heads + h, i);
              CHECK(floats ? lost != lost : std::memcmp(&lost, &nan_bits, sizeof(T)) == 0);
            }
          CHECK(call(q.data(), heads * size, size, heads, nullptr, 0, 0, 0, positions.data(), table.data(), 2, tokens, rot,
                     interleaved, dtype) == 0);
        }
  CHECK(call(nullptr, 0, 0, 1, nullptr, 0, 0, 0, nullptr, nullptr, 1, 0, 2, 0, 99) == -1);
  CHECK(call(nullptr, 0, 0, 1, nullptr, 0, 0, 0, nullptr, nullptr, 1, 1, 3, 0, dtype) == -2);
  CHECK(call(nullptr, 0, 0, 1, nullptr, 0, 0, 1, nullptr, nullptr, 1, 1, 2, 0, dtype) == -2);
  CHECK(call(nullptr, 0, 0, 1, nullptr, 0, 0, 1, nullptr, nullptr, 1, 0, 2, 0, dtype) == 0);
}

int main() {
  int ran = 0;
  for (const auto& level : gm_rotary_embedding_levels) {
    if (level.call == nullptr || !runs_here(level.name)) continue;
    run<float>(level.call, 0, 1.0f, -1.0f, 2.0f, 0.0f, true);
    run<uint16_t>(level.call, 1, 0x3c00, 0xbc00, 0x4000, 0x7e00, false);
    run<uint16_t>(level.call, 2, 0x3f80, 0xbf80, 0x4000, 0x7fc0, false);
    ++ran;
  }
  CHECK(ran > 0);
  std::printf("rotary_embedding: %d level(s)\n", ran);
}
