// gm_cache_store under the sanitizers: the last slot, padded rows, negative slots, slots past the cache.
#include "asan.h"

GM_LEVELS(gm_cache_store, (const char*, int64_t, int64_t, char*, int64_t, int64_t, int64_t, const int64_t*,
                           int64_t, int64_t, int64_t, int64_t, int64_t));

template <class Call>
void run(Call call) {
  const int64_t blocks = 3, block_size = 2, heads = 2;
  for (int64_t row : {1, 7, 64})
    for (int64_t pad : {0, 5}) {
      const int64_t tokens = 4, wide = row + pad;
      Buffer<char> source(tokens * heads, row, wide), cache(blocks * block_size * heads, row, wide);
      Buffer<int64_t> slots(tokens);
      const int64_t wanted[] = {5, -1, 0, -9};
      for (int64_t t = 0; t < tokens; ++t) {
        slots.data()[t] = wanted[t];
        for (int64_t h = 0; h < heads; ++h)
          for (int64_t i = 0; i < row; ++i) source(t * heads + h, i) = static_cast<char>(1 + t * heads + h);
      }
      auto store = [&] {
        return call(source.data(), heads * wide, wide, cache.data(), block_size * heads * wide, heads * wide,
                    wide, slots.data(), tokens, heads, row, blocks, block_size);
      };
      slots.data()[3] = 6;
      CHECK(store() == -5);
      for (int64_t r = 0; r < blocks * block_size * heads; ++r) CHECK(cache(r, row - 1) == 0);
      slots.data()[3] = -9;
      CHECK(store() == 0);
      for (int64_t s = 0; s < blocks * block_size; ++s)
        for (int64_t h = 0; h < heads; ++h)
          for (int64_t i = 0; i < row; ++i)
            CHECK(cache(s * heads + h, i) == (s == 5 ? 1 + h : s == 0 ? 5 + h : 0));
    }
  CHECK(call(nullptr, 0, 0, nullptr, 0, 0, 0, nullptr, 0, 1, 1, 1, 0) == -2);
  CHECK(call(nullptr, 0, 0, nullptr, 0, 0, 0, nullptr, 0, 1, 1, 1, 1) == 0);
}

int main() {
  int ran = 0;
  for (const auto& level : gm_cache_store_levels) {
    if (level.call == nullptr || !runs_here(level.name)) continue;
    run(level.call);
    ++ran;
  }
  CHECK(ran > 0);
  std::printf("reshape_and_cache: %d level(s)\n", ran);
}
