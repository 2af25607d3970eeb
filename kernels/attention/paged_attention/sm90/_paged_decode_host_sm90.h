// What the kernels of decode get of a call, and what their entries check of it.
#pragma once
#include "_paged_decode_copy_sm90.cuh"
#include "_paged_host_sm90.h"
#ifndef __CUDACC__

namespace gm {

// As paged_sizes, of a call of few rows of each sequence, by at most `ctas` CTAs.
inline int decode_sizes(const GmPagedAttentionCall& call, int64_t ctas, PagedSizes* s) {
  if (const int refused = paged_sizes(call, s)) return refused;
  if (call.max_q < 1) return GM_E_SHAPE;
  const bool few = call.max_q <= 16 && call.max_q * s->group <= 16;
  return few && ctas >= 1 && ctas <= INT_MAX / 64 && call.max_ctx >= 1 ? GM_OK : GM_E_ARG;
}

// The one of all instances for the dtype, the head size and the rows of a call; null if there is none.
template <typename Instance, int COUNT>
Instance* decode_instance(Instance (&all)[COUNT], const GmPagedAttentionCall& call, const PagedSizes& s) {
  const int rows = call.max_q * s.group > 8 ? 16 : 8;
  for (Instance& i : all)
    if (i.dtype == (s.codes ? 0 : s.dtype) && i.head_dim == s.head_dim && i.rows == rows) return &i;
  return nullptr;
}

// All but pieces, sequence_cost and even. False where rows of the tensors do not begin at multiples of 16 bytes. counters_at,
// parts_at: places in the workspace.
inline bool fill_params(const GmPagedAttentionCall& call, const PagedSizes& s, int64_t counters_at,
                        int64_t parts_at, DecodeParams* to) {
  const int64_t *const k = call.k_cache_stride, *const v = call.v_cache_stride;
  if (!rows_aligned(call.q, call.q_stride, 2, 2) || !rows_aligned(call.out, call.out_stride, 2, 2) ||
      !rows_aligned(call.k_cache, k, 3, s.bytes) || !rows_aligned(call.v_cache, v, 3, s.bytes) ||
      k[1] >= 1 << 30 || v[1] >= 1 << 30)
    return false;
  DecodeParams& p = *to;
  p.out = call.out, p.lse = static_cast<float*>(call.lse), p.sinks = static_cast<const float*>(call.sinks);
  p.table = static_cast<const int*>(call.block_table);
  p.query_start = static_cast<const int*>(call.query_start);
  p.seq_lens = static_cast<const int*>(call.seq_lens);
  p.counters = at<unsigned>(call.workspace, counters_at), p.parts = at<float>(call.workspace, parts_at);
  p.q = call.q, p.k = call.k_cache, p.v = call.v_cache;
  p.q_token = call.q_stride[0] * 2, p.q_head = call.q_stride[1] * 2;
  p.out_token = call.out_stride[0], p.out_head = call.out_stride[1];
  p.table_row = call.block_table_stride[0];
  p.k_block = k[0] * s.bytes, p.k_slot = int(k[1] * s.bytes), p.k_head = k[2] * s.bytes;
  p.v_block = v[0] * s.bytes, p.v_slot = int(v[1] * s.bytes), p.v_head = v[2] * s.bytes;
  p.seqs = s.seqs, p.heads = s.heads, p.kv_heads = s.kv_heads, p.head_dim = s.head_dim, p.group = s.group;
  p.window = s.window, p.page = s.page;
  p.by_page = 0xffffffffu / unsigned(s.page), p.by_group = (65536 + s.group - 1) / s.group;
  p.score_scale = s.scale * 1.4426950408889634f;
  p.scale_log2 = s.codes || s.softcap > 0.f ? 1.f : p.score_scale;
  set_scales(call, s, to);
  return true;
}

}  // namespace gm
#endif
