// gm_cache_store_e4m3 under the sanitizers: rows of every width around a vector, the last slot, padded rows,
// negative slots, slots past the cache, scales of heads and of tokens. Planted faults that this program was
// seen to catch: the tail of row_scale and of quantize_row taken as a whole vector (read past the tokens,
// write past the cache).
#include "asan.h"
#include "asan_values.h"
#include "calls/reshape_and_cache.h"

GM_LEVELS(gm_cache_store_e4m3, (const GmReshapeAndCacheCall&));
using Call = decltype(gm_cache_store_e4m3_levels[0].call);

template <class D>
void run(Call entry, int dtype, int64_t width, int64_t pad, bool by_token) {
  const int64_t blocks = 3, block_size = 2, heads = 2, tokens = 4, wide = width + pad;
  Numbers numbers;
  Buffer<typename D::T> source(tokens * heads, width, wide);
  Buffer<uint8_t> cache(blocks * block_size * heads, width, wide),
      values(blocks * block_size * heads, width, wide);
  Buffer<float> scale(by_token ? blocks * block_size * heads : heads),
      v_scale(by_token ? blocks * block_size * heads : heads);
  Buffer<int64_t> slots(tokens);
  const int64_t wanted[] = {5, -1, 0, 6};
  for (int64_t t = 0; t < tokens; ++t) slots.data()[t] = wanted[t];
  for (int64_t r = 0; r < tokens * heads; ++r)
    for (int64_t d = 0; d < width; ++d) source(r, d) = D::put(d == width - 1 ? 3.5f : numbers.eighths());
  if (!by_token)
    for (auto* one : {&scale, &v_scale}) one->data()[0] = 0.5f, one->data()[1] = 2.0f;
  const int64_t row = heads * wide, block_step = by_token ? block_size * heads : 99,
                slot_step = by_token ? heads : 99;
  const GmReshapeAndCacheCall call{.key = source.data(),
                                   .key_stride = {row, wide},
                                   .value = source.data(),
                                   .value_stride = {row, wide},
                                   .key_cache = cache.data(),
                                   .key_cache_stride = {block_size * row, row, wide},
                                   .value_cache = values.data(),
                                   .value_cache_stride = {block_size * row, row, wide},
                                   .slot_mapping = slots.data(),
                                   .k_scale = scale.data(),
                                   .k_scale_stride = {block_step, slot_step, 1},
                                   .v_scale = v_scale.data(),
                                   .v_scale_stride = {block_step, slot_step, 1},
                                   .t = tokens,
                                   .h = heads,
                                   .d = width,
                                   .dv = width,
                                   .blocks = blocks,
                                   .block_size = block_size,
                                   .scale_blocks = by_token ? blocks : 1,
                                   .scale_slots = by_token ? block_size : 1,
                                   .scale_heads = heads,
                                   .x_type = dtype,
                                   .kv_type = 3};
  const auto store = [&] { return entry(call); };
  CHECK(store() == -5);
  for (int64_t r = 0; r < blocks * block_size * heads; ++r) CHECK(cache(r, width - 1) == 0);
  slots.data()[3] = -9;
  CHECK(store() == 0);
  for (int64_t s = 0; s < blocks * block_size; ++s)
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t r = s * heads + h, token = s == 5 ? 0 : s == 0 ? 2 : -1;
      const float own = scale.data()[by_token ? r : h];
      if (by_token) CHECK(own == (token < 0 ? 0.0f : 3.5f / 448));  // the last element is the largest
      for (int64_t d = 0; d < width; ++d) {
        CHECK(values(r, d) == cache(r, d) && v_scale.data()[by_token ? r : h] == own);
        const float value = token < 0 ? 0.0f : D::get(source(token * heads + h, d));
        CHECK(std::fabs(own * e4m3(cache(r, d)) - value) <= std::fabs(value) / 16 + own / 1024);
      }
    }
}

int main() {
  int ran = 0;
  for (const auto& level : gm_cache_store_e4m3_levels) {
    if (level.call == nullptr || !runs_here(level.name)) continue;
    for (int64_t width : {1, 3, 4, 7, 8, 15, 16, 17, 33, 64})
      for (int64_t pad : {0, 5})
        for (bool by_token : {false, true}) {
          run<Dtype<0>>(level.call, 0, width, pad, by_token);
          run<Dtype<1>>(level.call, 1, width, pad, by_token);
          run<Dtype<2>>(level.call, 2, width, pad, by_token);
        }
    GmReshapeAndCacheCall none{.h = 1, .d = 1, .dv = 1, .blocks = 1, .block_size = 1};
    CHECK(level.call(none) == 0);
    none.block_size = 0;
    CHECK(level.call(none) == -2);
    none.block_size = 1, none.x_type = 99;
    CHECK(level.call(none) == -1);
    ++ran;
  }
  CHECK(ran > 0);
  std::printf("quantize_and_cache: %d level(s)\n", ran);
}
