// The arguments and outputs of reshape_and_cache_mla, as its native kernels get them. Written by `make generate` from the
// declaration of the operation; do not edit. kernel_registry/call_struct.py has the rules.
#pragma once
#include <cstdint>

struct GmReshapeAndCacheMlaCall {
  static constexpr uint64_t kDigest = 0x4535a50e4cad50e6;
  // [t, d]
  const void* latent;
  int64_t latent_stride[1];
  // [blocks, block_size, d]
  void* cache;
  int64_t cache_stride[2];
  // [t]
  const void* slot_mapping;
  int64_t t;
  int64_t d;
  int64_t blocks;
  int64_t block_size;
  // of latent
  int64_t x_type;
};
