// Attention over a paged cache, a paged latent cache, or dense sequences; see _flash_cpu.h.
// gm-levels: base avx2 avx512 neon
#include "_flash_cpu.h"
#include "calls/mla_attention.h"
#include "calls/paged_attention.h"
#include "calls/varlen_attention.h"
#include "kv_cache/_cache_scales_cpu.h"

namespace gm {
namespace {

// What the calls of the three operations have in common.
template <class Call>
Attention attention_of(const Call& call) {
  Attention a{};
  a.q = call.q, a.q_token = call.q_stride[0], a.q_head = call.q_stride[1];
  a.out = call.out, a.out_token = call.out_stride[0], a.out_head = call.out_stride[1];
  a.lse = static_cast<float*>(call.lse);
  a.query_start = static_cast<const int32_t*>(call.query_start);
  a.tokens = call.q_tokens, a.heads = call.heads, a.seqs = call.seqs, a.scale = float(call.scale);
  return a;
}

template <class Call>
Attention paged_attention_of(const Call& call) {
  Attention a = attention_of(call);
  a.table = static_cast<const int32_t*>(call.block_table);
  a.table_stride = call.block_table_stride[0], a.table_width = call.max_blocks;
  a.starts = static_cast<const int32_t*>(call.seq_lens);
  a.blocks = call.blocks, a.block_size = max(1, call.block_size);
  return a;
}

int attend(const Attention& a, int64_t type) {
  if (a.seqs < 1 || a.kv_heads < 1 || a.heads < 1 || a.heads % a.kv_heads || a.dk < 1 || a.dv < 1)
    return GM_E_SHAPE;
  if (a.v == a.k && a.k && a.dv > a.dk) return GM_E_SHAPE;
  if (!a.k_scale != !a.v_scale || (!a.k_scale && a.token_scales)) return GM_E_ARG;
  GM_DISPATCH_FLOAT(type, T, { return a.k_scale ? attend<T, f8e4m3>(a) : attend<T, T>(a); })
}

}  // namespace
}  // namespace gm

GM_CPU_CALL(gm_paged_attention, PagedAttention)(const GmPagedAttentionCall& call) {
  gm::Attention a = gm::paged_attention_of(call);
  a.k = call.k_cache, a.v = call.v_cache, a.kv_heads = call.kv_heads, a.dk = a.dv = call.head_dim;
  a.k_block = call.k_cache_stride[0], a.k_slot = call.k_cache_stride[1], a.k_head = call.k_cache_stride[2];
  a.v_block = call.v_cache_stride[0], a.v_slot = call.v_cache_stride[1], a.v_head = call.v_cache_stride[2];
  a.window = call.window, a.sinks = static_cast<const float*>(call.sinks), a.softcap = float(call.softcap);
  const gm::ScaleStrides of_k = gm::scale_strides(call, call.k_scale_stride);
  const gm::ScaleStrides of_v = gm::scale_strides(call, call.v_scale_stride);
  a.k_scale = static_cast<const float*>(call.k_scale), a.v_scale = static_cast<const float*>(call.v_scale);
  a.k_scale_block = of_k.block, a.k_scale_slot = of_k.slot, a.k_scale_head = of_k.head;
  a.v_scale_block = of_v.block, a.v_scale_slot = of_v.slot, a.v_scale_head = of_v.head;
  a.token_scales = gm::has_token_scales(call);
  return gm::attend(a, call.x_type);
}

// Keys are rows of the cache, and values their first latent_dim elements.
GM_CPU_CALL(gm_mla_attention, MlaAttention)(const GmMlaAttentionCall& call) {
  gm::Attention a = gm::paged_attention_of(call);
  a.k = a.v = call.cache, a.kv_heads = 1, a.dk = call.latent_dim + call.rope_dim, a.dv = call.latent_dim;
  a.k_block = a.v_block = call.cache_stride[0], a.k_slot = a.v_slot = call.cache_stride[1];
  return gm::attend(a, call.x_type);
}

// The keys of all sequences, one after the other, are one block; starts: where those of each begin.
GM_CPU_CALL(gm_varlen_attention, VarlenAttention)(const GmVarlenAttentionCall& call) {
  gm::Attention a = gm::attention_of(call);
  a.k = call.k, a.v = call.v, a.kv_heads = call.kv_heads, a.dk = call.qk_dim, a.dv = call.v_dim;
  a.k_slot = call.k_stride[0], a.k_head = call.k_stride[1];
  a.v_slot = call.v_stride[0], a.v_head = call.v_stride[1];
  a.starts = static_cast<const int32_t*>(call.context_start);
  a.blocks = call.total_ctx, a.block_size = gm::max(1, call.total_ctx);
  a.window = call.window_left + 1, a.ahead = call.window_right < 0 ? call.total_ctx : call.window_right;
  return gm::attend(a, call.x_type);
}
