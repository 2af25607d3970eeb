// Tokens into a paged cache by slot:
// place slot % block_size of block slot / block_size. Negative slots are not written.
// gm-levels: base
// A copy has nothing to gain from wider vectors than memcpy takes.
#include "gm_cpu.h"

// source [tokens, heads, row bytes] -> cache [blocks, block_size, heads, row bytes]; every stride in bytes,
// rows contiguous. GM_E_ARG, and nothing written, if a slot is past the cache.
GM_KERNEL(gm_cache_store)(const char* source, int64_t source_token, int64_t source_head, char* cache,
                          int64_t cache_block, int64_t cache_place, int64_t cache_head, const int64_t* slots,
                          int64_t tokens, int64_t heads, int64_t row, int64_t blocks, int64_t block_size) {
  if (tokens < 0 || heads < 0 || row < 0 || blocks < 0 || block_size < 1) return GM_E_SHAPE;
  for (int64_t t = 0; t < tokens; ++t)
    if (slots[t] >= blocks * block_size) return GM_E_ARG;
  const int64_t grain = 65536 / (heads * row + 1) + 1;
  return gm::parallel_for(tokens, grain, [=](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      if (slots[t] < 0) continue;
      char* place = cache + slots[t] / block_size * cache_block + slots[t] % block_size * cache_place;
      for (int64_t h = 0; h < heads; ++h)
        std::memcpy(place + h * cache_head, source + t * source_token + h * source_head,
                    static_cast<size_t>(row));
    }
  });
}
