// The arguments and outputs of gelu_and_mul, as its native kernels get them. Written by `make generate` from the
// declaration of the operation; do not edit. kernel_registry/call_struct.py has the rules.
#pragma once
#include <cstdint>

struct GmGeluAndMulCall {
  static constexpr uint64_t kDigest = 0x3fa99641582108a9;
  // [..., 2*n]
  const void* x;
  // between rows
  int64_t x_stride[1];
  enum class Approximate : int64_t { none, tanh } approximate;
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
