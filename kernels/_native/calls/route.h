// The arguments and outputs of route, as its native kernels get them. Written by `make generate` from the
// declaration of the operation; do not edit. kernel_registry/call_struct.py has the rules.
#pragma once
#include <cstdint>

struct GmRouteCall {
  static constexpr uint64_t kDigest = 0x34766623f23f32fb;
  // [m, e]
  const void* logits;
  // between rows
  int64_t logits_stride[1];
  int64_t top_k;
  int64_t local;
  int64_t first;
  // [e]
  const void* bias;
  int64_t n_group;
  int64_t topk_group;
  enum class Scoring : int64_t { sigmoid, softmax } scoring;
  int64_t renormalize;
  double scale;
  // [m, top_k]
  void* weights;
  // [m, top_k]
  void* ids;
  // [local+1]
  void* expert_offsets;
  // [m*top_k]
  void* permutation;
  // [m*top_k]
  void* inverse;
  int64_t m;
  int64_t e;
  // of logits
  int64_t x_type;
};
