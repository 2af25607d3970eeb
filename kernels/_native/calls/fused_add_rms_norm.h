// The arguments and outputs of fused_add_rms_norm, as its native kernels get them. Written by `make generate` from the
// declaration of the operation; do not edit. kernel_registry/call_struct.py has the rules.
#pragma once
#include <cstdint>

struct GmFusedAddRmsNormCall {
  static constexpr uint64_t kDigest = 0x3f84c5ddef8acee8;
  // [..., n]
  const void* x;
  // between rows
  int64_t x_stride[1];
  // [..., n]
  void* residual;
  // between rows
  int64_t residual_stride[1];
  // [n]
  const void* weight;
  double eps;
  // [..., n]
  void* out;
  // between rows
  int64_t out_stride[1];
  // rows of x
  int64_t m;
  int64_t n;
  // of x
  int64_t x_type;
  // of weight
  int64_t w_type;
};
