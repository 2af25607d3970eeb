// Stores tokens into a paged cache: slot % block_size of block slot / block_size. Negative slots are skipped. One level:
// memcpy uses wide vectors already.
// gm-levels: base
#include "calls/reshape_and_cache.h"
#include "calls/reshape_and_cache_mla.h"
#include "gm_cpu.h"

namespace {

// Rows of tokens and of a cache; strides in bytes.
struct Rows {
  const void* source;
  int64_t source_token, source_head;
  void* cache;
  int64_t cache_block, cache_slot, cache_head, heads, bytes;
};

// GM_E_ARG, and nothing written, if a slot is past the cache.
int store(const Rows& r, const void* slot_mapping, int64_t tokens, int64_t blocks, int64_t block_size) {
  if (tokens < 0 || r.heads < 0 || r.bytes < 0 || blocks < 0 || block_size < 1) return GM_E_SHAPE;
  const int64_t* slots = static_cast<const int64_t*>(slot_mapping);
  for (int64_t t = 0; t < tokens; ++t)
    if (slots[t] >= blocks * block_size) return GM_E_ARG;
  const int64_t grain = 65536 / (r.heads * r.bytes + 1) + 1;
  return gm::parallel_for(tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      if (slots[t] < 0) continue;
      const char* from = static_cast<const char*>(r.source) + t * r.source_token;
      char* to = static_cast<char*>(r.cache) + slots[t] / block_size * r.cache_block +
                 slots[t] % block_size * r.cache_slot;
      for (int64_t h = 0; h < r.heads; ++h)
        std::memcpy(to + h * r.cache_head, from + h * r.source_head, static_cast<size_t>(r.bytes));
    }
  });
}

}  // namespace

// Caches of the dtype of the tokens.
GM_CPU_CALL(gm_cache_store, ReshapeAndCache)(const GmReshapeAndCacheCall& call) {
  if (call.kv_type != call.x_type) return GM_E_DTYPE;
  const int64_t item = gm::item_bytes(call.x_type);
  const Rows keys{call.key,
                  call.key_stride[0] * item,
                  call.key_stride[1] * item,
                  call.key_cache,
                  call.key_cache_stride[0] * item,
                  call.key_cache_stride[1] * item,
                  call.key_cache_stride[2] * item,
                  call.h,
                  call.d * item};
  const Rows values{call.value,
                    call.value_stride[0] * item,
                    call.value_stride[1] * item,
                    call.value_cache,
                    call.value_cache_stride[0] * item,
                    call.value_cache_stride[1] * item,
                    call.value_cache_stride[2] * item,
                    call.h,
                    call.dv * item};
  const int code = store(keys, call.slot_mapping, call.t, call.blocks, call.block_size);
  return code ? code : store(values, call.slot_mapping, call.t, call.blocks, call.block_size);
}

GM_CPU_CALL(gm_cache_store_mla, ReshapeAndCacheMla)(const GmReshapeAndCacheMlaCall& call) {
  const int64_t item = gm::item_bytes(call.x_type);
  const Rows latents{call.latent,
                     call.latent_stride[0] * item,
                     0,
                     call.cache,
                     call.cache_stride[0] * item,
                     call.cache_stride[1] * item,
                     0,
                     1,
                     call.d * item};
  return store(latents, call.slot_mapping, call.t, call.blocks, call.block_size);
}
