// The arguments and outputs of merge_attention_states, as its native kernels get them. Written by `make generate` from the
// declaration of the operation; do not edit. kernel_registry/call_struct.py has the rules.
#pragma once
#include <cstdint>

struct GmMergeAttentionStatesCall {
  static constexpr uint64_t kDigest = 0x49f3514039d34d0d;
  // [t, h, d]
  const void* a;
  // [t, h]
  const void* a_lse;
  // [t, h, d]
  const void* b;
  // [t, h]
  const void* b_lse;
  // [t, h, d]
  void* out;
  // [t, h]
  void* lse;
  int64_t t;
  int64_t h;
  int64_t d;
  // of a
  int64_t x_type;
};
