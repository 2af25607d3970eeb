// The arguments and outputs of permute, as its native kernels get them. Written by `make generate` from the
// declaration of the operation; do not edit. kernel_registry/call_struct.py has the rules.
#pragma once
#include <cstdint>

struct GmPermuteCall {
  static constexpr uint64_t kDigest = 0x647158f79ee8062e;
  // [m, top_k]
  const void* ids;
  int64_t experts;
  // [e+1]
  void* expert_offsets;
  // [m*top_k]
  void* permutation;
  // [m*top_k]
  void* inverse;
  int64_t m;
  int64_t top_k;
  int64_t e;
};
