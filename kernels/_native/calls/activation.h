// The arguments and outputs of activation, as its native kernels get them. Written by `make generate` from the
// declaration of the operation; do not edit. kernel_registry/call_struct.py has the rules.
#pragma once
#include <cstdint>

struct GmActivationCall {
  static constexpr uint64_t kDigest = 0x4e86e99499223b00;
  // [..., n]
  const void* x;
  // between rows
  int64_t x_stride[1];
  enum class Function : int64_t { gelu, gelu_tanh, silu, relu, relu2 } function;
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
