// The arguments and outputs of linear, as its native kernels get them. Written by `make generate` from the
// declaration of the operation; do not edit. kernel_registry/call_struct.py has the rules.
#pragma once
#include <cstdint>

struct GmLinearCall {
  static constexpr uint64_t kDigest = 0x45ab629005b47e8e;
  // [..., k]
  const void* x;
  // between rows
  int64_t x_stride[1];
  // of [n, k]
  const void* weight[6];
  int64_t weight_size[6];
  int64_t weight_type[6];
  // [n]
  const void* bias;
  // [..., n//(1+silu_mul)]
  const void* residual;
  int64_t silu_mul;
  int64_t n;
  void* workspace;
  int64_t workspace_bytes;
  // [..., k]
  const void* codes;
  // between rows
  int64_t codes_stride[1];
  // [rows, groups]
  const void* scales;
  int64_t scales_stride[2];
  // [..., n//(1+silu_mul)]
  void* out;
  // rows of x
  int64_t m;
  int64_t k;
  int64_t rows;
  int64_t groups;
  // of x
  int64_t x_type;
};
