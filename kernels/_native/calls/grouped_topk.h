// The arguments and outputs of grouped_topk, as its native kernels get them. Written by `make generate` from the
// declaration of the operation; do not edit. kernel_registry/call_struct.py has the rules.
#pragma once
#include <cstdint>

struct GmGroupedTopkCall {
  static constexpr uint64_t kDigest = 0x1ee9f9598a7fc8a0;
  // [..., e]
  const void* logits;
  // between rows
  int64_t logits_stride[1];
  int64_t top_k;
  // [e]
  const void* bias;
  int64_t n_group;
  int64_t topk_group;
  enum class Scoring : int64_t { sigmoid, softmax } scoring;
  int64_t renormalize;
  double scale;
  // [..., top_k]
  void* weights;
  // [..., top_k]
  void* ids;
  // rows of logits
  int64_t m;
  int64_t e;
  // of logits
  int64_t x_type;
};
