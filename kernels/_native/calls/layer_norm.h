// The arguments and outputs of layer_norm, as its native kernels get them. Written by `make generate` from the
// declaration of the operation; do not edit. kernel_registry/call_struct.py has the rules.
#pragma once
#include <cstdint>

struct GmLayerNormCall {
  static constexpr uint64_t kDigest = 0x1cb334c7428bef10;
  // [..., n]
  const void* x;
  // between rows
  int64_t x_stride[1];
  // [n]
  const void* weight;
  // [n]
  const void* bias;
  double eps;
  // [..., n]
  void* residual;
  // between rows
  int64_t residual_stride[1];
  // [..., n]
  void* out;
  // between rows
  int64_t out_stride[1];
  // rows of x
  int64_t m;
  int64_t n;
  // of x
  int64_t x_type;
};
