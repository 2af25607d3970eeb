// Of each token of a packed projection: RMSNorm of the heads of q and k, rotary embedding of both, keys and
// values into a paged cache. The rows of rms_norm, rotary_embedding and reshape_and_cache, one after the
// other while a head is in the L1 cache: the same bits as the three.
// gm-levels: base avx2 avx512 neon
#include "norm/_rms_norm_row_cpu.h"
#include "rope/_rotate_heads_cpu.h"
#include "_quantize_row_cpu.h"

namespace gm {
namespace {

constexpr int64_t kHead = 1024;  // elements of a head that is quantized, at most

struct Cache {
  void* base;
  float* scale;  // null: values of the projection's dtype
  int64_t block, place, head;
  int64_t scale_block, scale_place, scale_head;
};

struct QkvJob {
  const void *qkv, *q_weight, *k_weight;
  void* q;
  const int64_t *positions, *slots;
  const float* cos_sin;
  Cache key, value;
  int64_t tokens, q_heads, kv_heads, width, token_stride, head_stride, rows, rot, interleaved, blocks,
      block_size, token_scales;
  float eps;
};

// One head of q or k: normalized if there is a weight, and rotated.
template <class T>
void turn(const QkvJob& j, const T* from, const void* weight, const float* row, T* to) {
  if (weight)
    rms_norm_row(from, static_cast<const T*>(weight), to, j.width, j.eps);
  else
    std::memcpy(to, from, static_cast<size_t>(j.width) * sizeof(T));
  rotate_heads(to, 0, 1, row, j.rot, j.interleaved != 0);
}

template <class T>
void quantize_head(const QkvJob& j, const T* head, f8e4m3* codes, float* scale) {
  if (j.token_scales) *scale = row_scale(head, j.width);
  quantize_row(head, codes, j.width, *scale);
}

template <class T>
void store_token(const QkvJob& j, const T* key, const float* row, int64_t slot) {
  const T* value = key + j.kv_heads * j.head_stride;
  const int64_t block = slot / j.block_size, place = slot % j.block_size;
  const int64_t to_key = block * j.key.block + place * j.key.place,
                to_value = block * j.value.block + place * j.value.place;
  for (int64_t h = 0; h < j.kv_heads; ++h, key += j.head_stride, value += j.head_stride) {
    const int64_t k = to_key + h * j.key.head, v = to_value + h * j.value.head;
    if (j.key.scale == nullptr) {
      turn(j, key, j.k_weight, row, static_cast<T*>(j.key.base) + k);
      std::memcpy(static_cast<T*>(j.value.base) + v, value, static_cast<size_t>(j.width) * sizeof(T));
      continue;
    }
    const auto scale = [&](const Cache& c) {
      return c.scale + block * c.scale_block + place * c.scale_place + h * c.scale_head;
    };
    T turned[kHead];
    turn(j, key, j.k_weight, row, turned);
    quantize_head(j, turned, static_cast<f8e4m3*>(j.key.base) + k, scale(j.key));
    quantize_head(j, value, static_cast<f8e4m3*>(j.value.base) + v, scale(j.value));
  }
}

template <class T>
int run(const QkvJob& j) {
  for (int64_t t = 0; t < j.tokens; ++t)
    if (j.slots[t] >= j.blocks * j.block_size) return GM_E_ARG;
  const int64_t grain = 8192 / ((j.q_heads + 2 * j.kv_heads) * j.width + 1) + 1;
  return parallel_for(j.tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t position = j.positions[t];
      const float* row = position >= 0 && position < j.rows ? j.cos_sin + position * j.rot : nullptr;
      const T* head = static_cast<const T*>(j.qkv) + t * j.token_stride;
      T* q = static_cast<T*>(j.q) + t * j.q_heads * j.width;
      for (int64_t h = 0; h < j.q_heads; ++h, head += j.head_stride, q += j.width)
        turn(j, head, j.q_weight, row, q);
      if (j.slots[t] >= 0) store_token(j, head, row, j.slots[t]);
    }
  });
}

}  // namespace
}  // namespace gm

// qkv [tokens, q_heads + 2 kv_heads, width] of `dtype` -> q [tokens, q_heads, width], contiguous, and the
// caches [blocks, block_size, kv_heads, width]; strides in elements, heads contiguous. q_weight, k_weight
// [width], null: no norm. cos_sin [rows, rot]. k_scale, v_scale: null for caches of `dtype`; of caches of
// e4m3 codes read by head or, with token_scales, written by token and head. GM_E_ARG, and nothing written, if
// a slot is past the cache.
GM_KERNEL(gm_qk_norm_rope_cache)(const void* qkv, const void* q_weight, const void* k_weight, float eps,
                                 const int64_t* positions, const float* cos_sin, void* key_cache,
                                 void* value_cache, const int64_t* slots, float* k_scale, float* v_scale,
                                 void* q, const int64_t* sizes, int dtype) {
  gm::QkvJob j{};
  j.qkv = qkv, j.q_weight = q_weight, j.k_weight = k_weight, j.q = q, j.eps = eps;
  j.positions = positions, j.cos_sin = cos_sin, j.slots = slots;
  j.key.base = key_cache, j.value.base = value_cache, j.key.scale = k_scale, j.value.scale = v_scale;
  int64_t* const fields[] = {&j.tokens,
                             &j.q_heads,
                             &j.kv_heads,
                             &j.width,
                             &j.token_stride,
                             &j.head_stride,
                             &j.rows,
                             &j.rot,
                             &j.interleaved,
                             &j.blocks,
                             &j.block_size,
                             &j.token_scales,
                             &j.key.block,
                             &j.key.place,
                             &j.key.head,
                             &j.value.block,
                             &j.value.place,
                             &j.value.head,
                             &j.key.scale_block,
                             &j.key.scale_place,
                             &j.key.scale_head,
                             &j.value.scale_block,
                             &j.value.scale_place,
                             &j.value.scale_head};
  for (int64_t* field : fields) *field = *sizes++;
  if (j.tokens < 0 || j.q_heads < 1 || j.kv_heads < 1 || j.rot < 2 || j.rot % 2 != 0 || j.rot > j.width ||
      j.blocks < 0 || j.block_size < 1 || (k_scale == nullptr) != (v_scale == nullptr) ||
      (k_scale != nullptr && j.width > gm::kHead))
    return GM_E_SHAPE;
  GM_DISPATCH_FLOAT(dtype, T, { return gm::run<T>(j); })
}
