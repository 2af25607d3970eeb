// The arguments and outputs of all_reduce_add_rms_norm, as its native kernels get them. Written by `make generate` from the
// declaration of the operation; do not edit. kernel_registry/call_struct.py has the rules.
#pragma once
#include <cstdint>

struct GmAllReduceAddRmsNormCall {
  static constexpr uint64_t kDigest = 0x3dcea4b2476b8103;
  // [m, n]
  const void* x;
  // [m, n]
  void* residual;
  // [n]
  const void* weight;
  double eps;
  int64_t world;
  // [m, n]
  void* out;
  int64_t m;
  int64_t n;
  // of x
  int64_t x_type;
};
