// Tokens into a paged cache of e4m3 codes by slot, with scales of heads that are given, or of tokens and
// heads that are written (kv_cache/quantized.py has the rules).
// gm-levels: base avx2 avx512 neon
#include "_quantize_row_cpu.h"

namespace gm {
namespace {

struct QuantizedStore {
  const void* source;
  f8e4m3* cache;
  float* scale;
  const int64_t* slots;
  int64_t tokens, heads, width, blocks, block_size, source_token, source_head, cache_block, cache_place,
      cache_head, token_scales, scale_block, scale_place, scale_head;
};

template <class T>
int store_quantized(const QuantizedStore& a) {
  for (int64_t t = 0; t < a.tokens; ++t)
    if (a.slots[t] >= a.blocks * a.block_size) return GM_E_ARG;
  const int64_t grain = 16384 / (a.heads * a.width + 1) + 1;
  return parallel_for(a.tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      if (a.slots[t] < 0) continue;
      const int64_t block = a.slots[t] / a.block_size, place = a.slots[t] % a.block_size;
      f8e4m3* codes = a.cache + block * a.cache_block + place * a.cache_place;
      float* scales = a.scale + block * a.scale_block + place * a.scale_place;
      for (int64_t h = 0; h < a.heads; ++h) {
        const T* row = static_cast<const T*>(a.source) + t * a.source_token + h * a.source_head;
        float* scale = scales + h * a.scale_head;
        if (a.token_scales) *scale = row_scale(row, a.width);
        quantize_row(row, codes + h * a.cache_head, a.width, *scale);
      }
    }
  });
}

}  // namespace
}  // namespace gm

// source [tokens, heads, width] of `dtype` -> cache [blocks, block_size, heads, width] of codes; strides in
// elements, rows contiguous. scale is read by head, or, with token_scales, written by token and head.
// GM_E_ARG, and nothing written, if a slot is past the cache.
GM_KERNEL(gm_cache_store_e4m3)(const void* source, void* cache, float* scale, const int64_t* slots,
                               const int64_t* sizes, int dtype) {
  gm::QuantizedStore a{};
  a.source = source, a.cache = static_cast<gm::f8e4m3*>(cache), a.scale = scale, a.slots = slots;
  int64_t* const fields[] = {&a.tokens,       &a.heads,       &a.width,       &a.blocks,      &a.block_size,
                             &a.source_token, &a.source_head, &a.cache_block, &a.cache_place, &a.cache_head,
                             &a.token_scales, &a.scale_block, &a.scale_place, &a.scale_head};
  for (int64_t* field : fields) *field = *sizes++;
  if (a.tokens < 0 || a.heads < 0 || a.width < 0 || a.blocks < 0 || a.block_size < 1) return GM_E_SHAPE;
  GM_DISPATCH_FLOAT(dtype, T, { return gm::store_quantized<T>(a); })
}
