// RMSNorm and rotary embedding of the heads of q and k of a packed projection, and storing of keys and values into a
// paged cache: the row functions of rms_norm, rotary_embedding and reshape_and_cache while a head is in the L1 cache,
// with the same bits as the three operations.
// gm-levels: base avx2 avx512 neon
#include "_cache_scales_cpu.h"
#include "_quantize_row_cpu.h"
#include "calls/qk_norm_rope_cache.h"
#include "norm/_rms_norm_row_cpu.h"
#include "rope/_rotate_heads_cpu.h"

namespace gm {
namespace {

using Call = GmQkNormRopeCacheCall;
constexpr int64_t kHead = 1024;  // elements at most of a head that is quantized

// A weight of norms, in the dtype of the projection or float32; null: no norm.
struct Weight {
  const void* data;
  bool wide;
};

// One head of q or k: normalized if there is a weight, and rotated.
template <class T>
void norm_and_rotate(const Call& c, const T* from, Weight weight, const float* row, T* to) {
  if (weight.data && weight.wide)
    rms_norm_row(from, static_cast<const float*>(weight.data), to, c.head_dim, float(c.eps));
  else if (weight.data)
    rms_norm_row(from, static_cast<const T*>(weight.data), to, c.head_dim, float(c.eps));
  else
    std::memcpy(to, from, static_cast<size_t>(c.head_dim) * sizeof(T));
  rotate_heads(to, 0, 1, row, c.rot, c.interleaved != 0);
}

template <class T>
void quantize_head(const Call& c, const T* head, f8e4m3* codes, float* scale) {
  if (has_token_scales(c)) *scale = row_scale(head, c.head_dim);
  quantize_row(head, codes, c.head_dim, *scale);
}

template <class T>
void store_token(const Call& c, const T* key, Weight weight, const float* row, int64_t slot) {
  const int64_t head_stride = c.qkv_stride[1];
  const T* value = key + c.kv_heads * head_stride;
  const int64_t block = slot / c.block_size, place = slot % c.block_size;
  const int64_t to_key = block * c.key_cache_stride[0] + place * c.key_cache_stride[1],
                to_value = block * c.value_cache_stride[0] + place * c.value_cache_stride[1];
  const auto scale = [&](void* base, const int64_t* stride, int64_t h) {
    const ScaleStrides step = scale_strides(c, stride);
    return static_cast<float*>(base) + block * step.block + place * step.slot + h * step.head;
  };
  for (int64_t h = 0; h < c.kv_heads; ++h, key += head_stride, value += head_stride) {
    const int64_t k = to_key + h * c.key_cache_stride[2], v = to_value + h * c.value_cache_stride[2];
    if (c.k_scale == nullptr) {
      norm_and_rotate(c, key, weight, row, static_cast<T*>(c.key_cache) + k);
      std::memcpy(static_cast<T*>(c.value_cache) + v, value, static_cast<size_t>(c.head_dim) * sizeof(T));
      continue;
    }
    T rotated[kHead];
    norm_and_rotate(c, key, weight, row, rotated);
    quantize_head(c, rotated, static_cast<f8e4m3*>(c.key_cache) + k, scale(c.k_scale, c.k_scale_stride, h));
    quantize_head(c, value, static_cast<f8e4m3*>(c.value_cache) + v, scale(c.v_scale, c.v_scale_stride, h));
  }
}

template <class T>
int run(const Call& c, bool wide) {
  const int64_t *positions = static_cast<const int64_t*>(c.positions),
                *slots = static_cast<const int64_t*>(c.slot_mapping);
  for (int64_t t = 0; t < c.t; ++t)
    if (slots[t] >= c.blocks * c.block_size) return GM_E_ARG;
  const int64_t grain = 8192 / ((c.heads + 2 * c.kv_heads) * c.head_dim + 1) + 1;
  return parallel_for(c.t, grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t position = positions[t];
      const float* row = position >= 0 && position < c.positions_count
                             ? static_cast<const float*>(c.cos_sin) + position * c.rot
                             : nullptr;
      const T* head = static_cast<const T*>(c.qkv) + t * c.qkv_stride[0];
      T* q = static_cast<T*>(c.q) + t * c.heads * c.head_dim;
      for (int64_t h = 0; h < c.heads; ++h, head += c.qkv_stride[1], q += c.head_dim)
        norm_and_rotate(c, head, {c.q_weight, wide}, row, q);
      if (slots[t] >= 0) store_token(c, head, {c.k_weight, wide}, row, slots[t]);
    }
  });
}

}  // namespace
}  // namespace gm

// GM_E_ARG, and nothing written, if a slot is past the cache. wide: the weights of norms are float32.
GM_CPU_CALL(gm_qk_norm_rope_cache, QkNormRopeCache, wide)
(const GmQkNormRopeCacheCall& call, const gm_qk_norm_rope_cache_options& options) {
  if (call.t < 0 || call.heads < 1 || call.kv_heads < 1 || call.rot < 2 || call.rot % 2 != 0 ||
      call.rot > call.head_dim || call.blocks < 0 || call.block_size < 1 ||
      (call.k_scale == nullptr) != (call.v_scale == nullptr) ||
      (call.k_scale != nullptr && call.head_dim > gm::kHead))
    return GM_E_SHAPE;
  GM_DISPATCH_FLOAT(call.x_type, T, { return gm::run<T>(call, options.wide != 0); })
}
