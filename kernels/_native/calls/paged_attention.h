// The arguments and outputs of paged_attention, as its native kernels get them. Written by `make generate` from the
// declaration of the operation; do not edit. kernel_registry/call_struct.py has the rules.
#pragma once
#include <cstdint>

struct GmPagedAttentionCall {
  static constexpr uint64_t kDigest = 0x4a26df76ae2deccb;
  // [q_tokens, heads, head_dim]
  const void* q;
  int64_t q_stride[2];
  // [blocks, block_size, kv_heads, head_dim]
  const void* k_cache;
  int64_t k_cache_stride[3];
  // [blocks, block_size, kv_heads, head_dim]
  const void* v_cache;
  int64_t v_cache_stride[3];
  // [seqs, max_blocks]
  const void* block_table;
  int64_t block_table_stride[1];
  // [seqs+1]
  const void* query_start;
  // [seqs]
  const void* seq_lens;
  int64_t max_q;
  int64_t max_ctx;
  double scale;
  int64_t window;
  // [heads]
  const void* sinks;
  // [q_tokens, heads]
  void* lse;
  void* workspace;
  int64_t workspace_bytes;
  // [scale_blocks, scale_slots, scale_heads]
  const void* k_scale;
  int64_t k_scale_stride[3];
  // [scale_blocks, scale_slots, scale_heads]
  const void* v_scale;
  int64_t v_scale_stride[3];
  double softcap;
  // [q_tokens, heads, head_dim]
  void* out;
  int64_t out_stride[2];
  int64_t q_tokens;
  int64_t heads;
  int64_t head_dim;
  int64_t blocks;
  int64_t block_size;
  int64_t kv_heads;
  int64_t seqs;
  int64_t max_blocks;
  int64_t scale_blocks;
  int64_t scale_slots;
  int64_t scale_heads;
  // of q
  int64_t x_type;
  // of k_cache
  int64_t kv_type;
};
