// The arguments and outputs of moe, as its native kernels get them. Written by `make generate` from the
// declaration of the operation; do not edit. kernel_registry/call_struct.py has the rules.
#pragma once
#include <cstdint>

struct GmMoeCall {
  static constexpr uint64_t kDigest = 0x4e2f51c1e3e97e3d;
  // [m, h]
  const void* x;
  // [m, top_k]
  const void* weights;
  // [m, top_k]
  const void* ids;
  // of [e, (1+gated)*i, h]
  const void* w13[6];
  int64_t w13_size[6];
  int64_t w13_type[6];
  // of [e, h, i]
  const void* w2[6];
  int64_t w2_size[6];
  int64_t w2_type[6];
  int64_t inter;
  void* workspace;
  int64_t workspace_bytes;
  // [e, (1+gated)*i]
  const void* w13_bias;
  // [e, h]
  const void* w2_bias;
  int64_t clamp;
  double alpha;
  double limit;
  // [m, h]
  const void* codes;
  int64_t codes_stride[1];
  // [rows, groups]
  const void* scales;
  int64_t scales_stride[2];
  enum class Activation : int64_t { silu, gelu, gelu_tanh, relu, relu2 } activation;
  int64_t gated;
  // [e+1]
  const void* expert_offsets;
  // [m*top_k]
  const void* permutation;
  // [m*top_k]
  const void* inverse;
  // [m, h]
  void* out;
  int64_t m;
  int64_t h;
  int64_t top_k;
  int64_t e;
  int64_t rows;
  int64_t groups;
  // of x
  int64_t x_type;
};
