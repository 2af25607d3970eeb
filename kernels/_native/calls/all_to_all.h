// The arguments and outputs of all_to_all, as its native kernels get them. Written by `make generate` from the
// declaration of the operation; do not edit. kernel_registry/call_struct.py has the rules.
#pragma once
#include <cstdint>

struct GmAllToAllCall {
  static constexpr uint64_t kDigest = 0x256c948c078c23af;
  // [m, world, n]
  const void* x;
  int64_t world;
  // [m, world, n]
  void* out;
  int64_t m;
  int64_t n;
  // of x
  int64_t x_type;
};
