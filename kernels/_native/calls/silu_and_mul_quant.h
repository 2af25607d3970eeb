// The arguments and outputs of silu_and_mul_quant, as its native kernels get them. Written by `make generate` from the
// declaration of the operation; do not edit. kernel_registry/call_struct.py has the rules.
#pragma once
#include <cstdint>

struct GmSiluAndMulQuantCall {
  static constexpr uint64_t kDigest = 0x60136defd7109445;
  // [..., 2*n]
  const void* x;
  // between rows
  int64_t x_stride[1];
  // [..., n]
  void* codes;
  // between rows
  int64_t codes_stride[1];
  // [rows, groups]
  void* scales;
  int64_t scales_stride[2];
  enum class Format : int64_t { fp8, fp8_token, fp8_g128, int8_token, int8_g32, int8_g128 } format;
  // rows of x
  int64_t m;
  int64_t n;
  int64_t rows;
  int64_t groups;
  // of x
  int64_t x_type;
  // of codes
  int64_t q_type;
};
