// The arguments and outputs of rotary_embedding, as its native kernels get them. Written by `make generate` from the
// declaration of the operation; do not edit. kernel_registry/call_struct.py has the rules.
#pragma once
#include <cstdint>

struct GmRotaryEmbeddingCall {
  static constexpr uint64_t kDigest = 0x43c0969dadb60185;
  // [t, hq, d]
  void* q;
  int64_t q_stride[2];
  // [t, hk, d]
  void* k;
  int64_t k_stride[2];
  // [t]
  const void* positions;
  // [positions, rot]
  const void* cos_sin;
  int64_t interleaved;
  int64_t t;
  int64_t hq;
  int64_t d;
  int64_t positions_count;
  int64_t rot;
  int64_t hk;
  // of q
  int64_t x_type;
};
