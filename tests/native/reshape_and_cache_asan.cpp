// gm_cache_store and gm_cache_store_mla under the sanitizers: the last slot, padded rows, negative slots, slots past the cache.
#include "asan.h"
#include "calls/reshape_and_cache.h"
#include "calls/reshape_and_cache_mla.h"

GM_LEVELS(gm_cache_store, (const GmReshapeAndCacheCall&));
GM_LEVELS(gm_cache_store_mla, (const GmReshapeAndCacheMlaCall&));

// One source and cache of float rows, in elements; latents have one head.
struct Store {
  decltype(gm_cache_store_levels[0].call) both;
  decltype(gm_cache_store_mla_levels[0].call) latents;
  int operator()(const float* source, int64_t token, int64_t head, float* cache, float* values, int64_t block,
                 int64_t slot, int64_t next, const int64_t* slots, int64_t t, int64_t h, int64_t d,
                 int64_t blocks, int64_t block_size) const {
    if (h == 1) {
      const GmReshapeAndCacheMlaCall call{.latent = source,
                                          .latent_stride = {token},
                                          .cache = cache,
                                          .cache_stride = {block, slot},
                                          .slot_mapping = slots,
                                          .t = t,
                                          .d = d,
                                          .blocks = blocks,
                                          .block_size = block_size};
      return latents(call);
    }
    const GmReshapeAndCacheCall call{.key = source,
                                     .key_stride = {token, head},
                                     .value = source,
                                     .value_stride = {token, head},
                                     .key_cache = cache,
                                     .key_cache_stride = {block, slot, next},
                                     .value_cache = values,
                                     .value_cache_stride = {block, slot, next},
                                     .slot_mapping = slots,
                                     .t = t,
                                     .h = h,
                                     .d = d,
                                     .dv = d,
                                     .blocks = blocks,
                                     .block_size = block_size};
    return both(call);
  }
};

void run(Store call, int64_t heads) {
  const int64_t blocks = 3, block_size = 2;
  for (int64_t row : {1, 7, 64})
    for (int64_t pad : {0, 5}) {
      const int64_t tokens = 4, wide = row + pad;
      Buffer<float> source(tokens * heads, row, wide), cache(blocks * block_size * heads, row, wide),
          values(blocks * block_size * heads, row, wide);
      Buffer<int64_t> slots(tokens);
      const int64_t wanted[] = {5, -1, 0, -9};
      for (int64_t t = 0; t < tokens; ++t) {
        slots.data()[t] = wanted[t];
        for (int64_t h = 0; h < heads; ++h)
          for (int64_t i = 0; i < row; ++i) source(t * heads + h, i) = float(1 + t * heads + h);
      }
      auto store = [&] {
        return call(source.data(), heads * wide, wide, cache.data(), values.data(), block_size * heads * wide,
                    heads * wide, wide, slots.data(), tokens, heads, row, blocks, block_size);
      };
      slots.data()[3] = 6;
      CHECK(store() == -5);
      for (int64_t r = 0; r < blocks * block_size * heads; ++r)
        CHECK(cache(r, row - 1) == 0 && values(r, row - 1) == 0);
      slots.data()[3] = -9;
      CHECK(store() == 0);
      for (int64_t s = 0; s < blocks * block_size; ++s)
        for (int64_t h = 0; h < heads; ++h)
          for (int64_t i = 0; i < row; ++i) {
            const float wanted = float(s == 5 ? 1 + h : s == 0 ? 2 * heads + 1 + h : 0);
            CHECK(cache(s * heads + h, i) == wanted && (heads == 1 || values(s * heads + h, i) == wanted));
          }
    }
  CHECK(call(nullptr, 0, 0, nullptr, nullptr, 0, 0, 0, nullptr, 0, heads, 1, 1, 0) == -2);
  CHECK(call(nullptr, 0, 0, nullptr, nullptr, 0, 0, 0, nullptr, 0, heads, 1, 1, 1) == 0);
}

int main() {
  int ran = 0;
  for (const auto& level : gm_cache_store_levels) {
    const auto& of_latents = gm_cache_store_mla_levels[&level - gm_cache_store_levels];
    if (level.call == nullptr || !runs_here(level.name) || !runs_here(of_latents.name)) continue;
    run({level.call, of_latents.call}, 1), run({level.call, of_latents.call}, 2);
    ++ran;
  }
  CHECK(ran > 0);
  std::printf("reshape_and_cache: %d level(s)\n", ran);
}
