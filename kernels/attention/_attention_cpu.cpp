// Causal attention over a paged cache, a paged latent cache, or dense sequences; see _flash_cpu.h.
// gm-levels: base avx2 avx512 neon
#include "_flash_cpu.h"

// q [tokens, heads, dk], out [tokens, heads, dv], all of one dtype with the given strides in elements and
// unit last stride. Paged: k and v [blocks, block_size, kv_heads, d], block_table [seqs, table_width], starts
// = seq_lens [seqs]. Dense (block_table null): k and v [blocks = all keys, kv_heads, d] by slot and head
// stride, starts = context_start [seqs + 1]. v == k: values are the first dv elements of the keys. lse
// [tokens, heads] and sinks [heads] may be null; window <= 0: none. k_scale and v_scale are null, and k and v
// of `dtype`, or k and v are e4m3 codes with float scales of the given strides. softcap > 0: a score s
// becomes softcap tanh(s / softcap).
GM_KERNEL(gm_attention)(const void* q, const void* k, const void* v, void* out, float* lse,
                        const float* sinks, const int32_t* block_table, const int32_t* query_start,
                        const int32_t* starts, const float* k_scale, const float* v_scale,
                        const int64_t* sizes, float scale, float softcap, int dtype) {
  gm::Attention a{};
  a.q = q, a.k = k, a.v = v, a.out = out, a.lse = lse, a.sinks = sinks;
  a.table = block_table, a.query_start = query_start, a.starts = starts, a.scale = scale;
  a.softcap = softcap;
  a.k_scale = k_scale, a.v_scale = v_scale;
  int64_t* const fields[] = {&a.tokens,       &a.heads,         &a.kv_heads,      &a.dk,
                             &a.dv,           &a.seqs,          &a.blocks,        &a.block_size,
                             &a.table_width,  &a.window,        &a.table_stride,  &a.q_token,
                             &a.q_head,       &a.out_token,     &a.out_head,      &a.k_block,
                             &a.k_slot,       &a.k_head,        &a.v_block,       &a.v_slot,
                             &a.v_head,       &a.token_scales,  &a.k_scale_block, &a.k_scale_slot,
                             &a.k_scale_head, &a.v_scale_block, &a.v_scale_slot,  &a.v_scale_head};
  for (int64_t* field : fields) *field = *sizes++;
  if (a.seqs < 1 || a.kv_heads < 1 || a.heads < 1 || a.heads % a.kv_heads || a.dk < 1 || a.dv < 1 ||
      a.block_size < 1)
    return GM_E_SHAPE;
  if (v == k && k && a.dv > a.dk) return GM_E_SHAPE;
  if (!k_scale != !v_scale || (!k_scale && a.token_scales)) return GM_E_ARG;
  GM_DISPATCH_FLOAT(dtype, T, { return k_scale ? gm::attend<T, gm::f8e4m3>(a) : gm::attend<T, T>(a); })
}
