// The arguments and outputs of reshape_and_cache, as its native kernels get them. Written by `make generate` from the
// declaration of the operation; do not edit. kernel_registry/call_struct.py has the rules.
#pragma once
#include <cstdint>

struct GmReshapeAndCacheCall {
  static constexpr uint64_t kDigest = 0x50ae205860ab86ce;
  // [t, h, d]
  const void* key;
  int64_t key_stride[2];
  // [t, h, dv]
  const void* value;
  int64_t value_stride[2];
  // [blocks, block_size, h, d]
  void* key_cache;
  int64_t key_cache_stride[3];
  // [blocks, block_size, h, dv]
  void* value_cache;
  int64_t value_cache_stride[3];
  // [t]
  const void* slot_mapping;
  // [scale_blocks, scale_slots, scale_heads]
  void* k_scale;
  int64_t k_scale_stride[3];
  // [scale_blocks, scale_slots, scale_heads]
  void* v_scale;
  int64_t v_scale_stride[3];
  int64_t t;
  int64_t h;
  int64_t d;
  int64_t dv;
  int64_t blocks;
  int64_t block_size;
  int64_t scale_blocks;
  int64_t scale_slots;
  int64_t scale_heads;
  // of key
  int64_t x_type;
  // of key_cache
  int64_t kv_type;
};
