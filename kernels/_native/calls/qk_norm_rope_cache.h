// The arguments and outputs of qk_norm_rope_cache, as its native kernels get them. Written by `make generate` from the
// declaration of the operation; do not edit. kernel_registry/call_struct.py has the rules.
#pragma once
#include <cstdint>

struct GmQkNormRopeCacheCall {
  static constexpr uint64_t kDigest = 0x3db3d064146168fc;
  // [t, heads+2*kv_heads, head_dim]
  const void* qkv;
  int64_t qkv_stride[2];
  // [head_dim]
  const void* q_weight;
  // [head_dim]
  const void* k_weight;
  double eps;
  // [t]
  const void* positions;
  // [positions, rot]
  const void* cos_sin;
  // [blocks, block_size, kv_heads, head_dim]
  void* key_cache;
  int64_t key_cache_stride[3];
  // [blocks, block_size, kv_heads, head_dim]
  void* value_cache;
  int64_t value_cache_stride[3];
  // [t]
  const void* slot_mapping;
  int64_t interleaved;
  // [scale_blocks, scale_slots, scale_heads]
  void* k_scale;
  int64_t k_scale_stride[3];
  // [scale_blocks, scale_slots, scale_heads]
  void* v_scale;
  int64_t v_scale_stride[3];
  // [t, heads, head_dim]
  void* q;
  int64_t t;
  int64_t head_dim;
  int64_t positions_count;
  int64_t rot;
  int64_t blocks;
  int64_t block_size;
  int64_t kv_heads;
  int64_t heads;
  int64_t scale_blocks;
  int64_t scale_slots;
  int64_t scale_heads;
  // of qkv
  int64_t x_type;
  // of key_cache
  int64_t kv_type;
};
