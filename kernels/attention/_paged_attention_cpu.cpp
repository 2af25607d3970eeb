// Causal attention over a paged KV cache; see _flash_cpu.h.
// gm-levels: base avx2 avx512 neon
#include "_flash_cpu.h"

// q, out [tokens, heads, D] and caches [blocks, block_size, kv_heads, D] with the given strides in elements, unit last stride, all of one
// dtype; block_table [seqs, table_stride]; sinks [heads] and lse [tokens, heads] may be null. window <= 0: none.
GM_KERNEL(gm_paged_attention)(const void* q, const void* k, const void* v, void* out, float* lse, const float* sinks,
                              const int32_t* block_table, const int32_t* query_start, const int32_t* seq_lens, const int64_t* sizes,
                              float scale, int dtype) {
  // sizes: table_stride, q_token, q_head, out_token, out_head, k_block, k_slot, k_head, v_block, v_slot, v_head, seqs, heads, kv_heads,
  // head_dim, block_size, window, tokens, blocks, table_width
  gm::Attention a{};
  a.q = q, a.k = k, a.v = v, a.out = out, a.lse = lse, a.sinks = sinks;
  a.table = block_table, a.query_start = query_start, a.seq_lens = seq_lens;
  a.table_stride = sizes[0], a.q_token = sizes[1], a.q_head = sizes[2], a.out_token = sizes[3], a.out_head = sizes[4];
  a.k_block = sizes[5], a.k_slot = sizes[6], a.k_head = sizes[7], a.v_block = sizes[8], a.v_slot = sizes[9], a.v_head = sizes[10];
  a.seqs = sizes[11], a.heads = sizes[12], a.kv_heads = sizes[13], a.dk = a.dv = sizes[14], a.block_size = sizes[15];
  a.window = sizes[16], a.tokens = sizes[17], a.blocks = sizes[18], a.table_width = sizes[19], a.scale = scale;
  if (a.seqs < 1 || a.kv_heads < 1 || a.heads % a.kv_heads || a.dk < 1 || a.block_size < 1) return GM_E_SHAPE;
  GM_DISPATCH_FLOAT(dtype, T, { return gm::attend<T>(a); })
}
