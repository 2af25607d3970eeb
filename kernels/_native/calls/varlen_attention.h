// The arguments and outputs of varlen_attention, as its native kernels get them. Written by `make generate` from the
// declaration of the operation; do not edit. kernel_registry/call_struct.py has the rules.
#pragma once
#include <cstdint>

struct GmVarlenAttentionCall {
  static constexpr uint64_t kDigest = 0x36cd8bf4be22ddb5;
  // [q_tokens, heads, qk_dim]
  const void* q;
  int64_t q_stride[2];
  // [total_ctx, kv_heads, qk_dim]
  const void* k;
  int64_t k_stride[2];
  // [total_ctx, kv_heads, v_dim]
  const void* v;
  int64_t v_stride[2];
  // [seqs+1]
  const void* query_start;
  // [seqs+1]
  const void* context_start;
  int64_t max_q;
  int64_t max_ctx;
  double scale;
  // [q_tokens, heads]
  void* lse;
  int64_t window_left;
  int64_t window_right;
  // [q_tokens, heads, v_dim]
  void* out;
  int64_t out_stride[2];
  int64_t q_tokens;
  int64_t heads;
  int64_t qk_dim;
  int64_t total_ctx;
  int64_t kv_heads;
  int64_t v_dim;
  int64_t seqs;
  // of q
  int64_t x_type;
};
