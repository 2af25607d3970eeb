// The arguments and outputs of grouped_linear, as its native kernels get them. Written by `make generate` from the
// declaration of the operation; do not edit. kernel_registry/call_struct.py has the rules.
#pragma once
#include <cstdint>

struct GmGroupedLinearCall {
  static constexpr uint64_t kDigest = 0x342419643072c77;
  // [rows, k]
  const void* x;
  // of [e, n, k]
  const void* weight[6];
  int64_t weight_size[6];
  int64_t weight_type[6];
  // [e+1]
  const void* expert_offsets;
  // [places]
  const void* permutation;
  int64_t top_k;
  int64_t silu_mul;
  int64_t n;
  // [e, n]
  const void* bias;
  int64_t clamp;
  double alpha;
  double limit;
  // [m, n//(1+silu_mul)]
  void* out;
  int64_t rows;
  int64_t k;
  int64_t e;
  int64_t m;
  int64_t places;
  // of x
  int64_t x_type;
};
