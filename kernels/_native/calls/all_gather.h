// The arguments and outputs of all_gather, as its native kernels get them. Written by `make generate` from the
// declaration of the operation; do not edit. kernel_registry/call_struct.py has the rules.
#pragma once
#include <cstdint>

struct GmAllGatherCall {
  static constexpr uint64_t kDigest = 0x5a96f2b1e9e5431d;
  // [m, n]
  const void* x;
  int64_t world;
  // [m, world*n]
  void* out;
  int64_t m;
  int64_t n;
  // of x
  int64_t x_type;
};
