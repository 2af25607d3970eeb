// The arguments and outputs of sample, as its native kernels get them. Written by `make generate` from the
// declaration of the operation; do not edit. kernel_registry/call_struct.py has the rules.
#pragma once
#include <cstdint>

struct GmSampleCall {
  static constexpr uint64_t kDigest = 0x598c573e490ed237;
  // [m, v]
  const void* logits;
  int64_t logits_stride[1];
  // [m]
  const void* temperature;
  // [m]
  const void* top_k;
  // [m]
  const void* top_p;
  // [m]
  const void* min_p;
  // [m]
  const void* seed;
  // [m]
  const void* index;
  void* workspace;
  int64_t workspace_bytes;
  // [m]
  void* ids;
  int64_t m;
  int64_t v;
  // of logits
  int64_t x_type;
};
