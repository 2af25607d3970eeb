// The arguments and outputs of mla_attention, as its native kernels get them. Written by `make generate` from the
// declaration of the operation; do not edit. kernel_registry/call_struct.py has the rules.
#pragma once
#include <cstdint>

struct GmMlaAttentionCall {
  static constexpr uint64_t kDigest = 0x43364c1eb4d5248e;
  // [q_tokens, heads, latent_dim+rope_dim]
  const void* q;
  int64_t q_stride[2];
  // [blocks, block_size, latent_dim+rope_dim]
  const void* cache;
  int64_t cache_stride[2];
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
  int64_t latent_dim;
  // [q_tokens, heads]
  void* lse;
  void* workspace;
  int64_t workspace_bytes;
  // [q_tokens, heads, latent_dim]
  void* out;
  int64_t out_stride[2];
  int64_t q_tokens;
  int64_t heads;
  int64_t rope_dim;
  int64_t blocks;
  int64_t block_size;
  int64_t seqs;
  int64_t max_blocks;
  // of q
  int64_t x_type;
};
