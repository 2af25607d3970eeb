// The arguments and outputs of all_reduce, as its native kernels get them. Written by `make generate` from the
// declaration of the operation; do not edit. kernel_registry/call_struct.py has the rules.
#pragma once
#include <cstdint>

struct GmAllReduceCall {
  static constexpr uint64_t kDigest = 0x64dc6097466ddce1;
  // [m, n]
  void* x;
  int64_t world;
  int64_t m;
  int64_t n;
  // of x
  int64_t x_type;
};
