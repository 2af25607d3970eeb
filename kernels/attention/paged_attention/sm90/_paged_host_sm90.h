// What the entries of paged attention on Hopper read of a call, and check.
#pragma once
#ifndef __CUDACC__
#include <climits>

#include "attention/sm90/_attention_host_sm90.h"
#include "calls/paged_attention.h"

namespace gm {

// The stride of scales along a dimension of `size` of them: 0 where they are shared.
inline int64_t scale_stride(int64_t size, int64_t stride) { return size == 1 ? 0 : stride; }

// The sizes and numbers of a call, in the types of the kernels. group: query heads of a KV head; bytes: of an
// element of the caches, 1 where they hold codes.
struct PagedSizes {
  int tokens, seqs, heads, kv_heads, head_dim, blocks, page, group, window, dtype, bytes;
  bool codes, by_token;
  float scale, softcap;
};

// GM_OK, or what of the call no kernel takes. dtype: 1 is fp16, 2 bf16.
inline int paged_sizes(const GmPagedAttentionCall& call, PagedSizes* s) {
  if (call.x_type != 1 && call.x_type != 2) return GM_E_DTYPE;
  const int64_t sizes[] = {call.q_tokens, call.seqs,   call.heads,     call.kv_heads,
                           call.head_dim, call.blocks, call.block_size};
  for (int64_t size : sizes)
    if (size < 0 || size > INT_MAX) return GM_E_SHAPE;
  if (call.seqs < 1 || call.kv_heads < 1 || call.heads < 1 || call.heads % call.kv_heads != 0 ||
      call.block_size < 1)
    return GM_E_SHAPE;
  s->tokens = int(call.q_tokens), s->seqs = int(call.seqs), s->heads = int(call.heads);
  s->kv_heads = int(call.kv_heads), s->head_dim = int(call.head_dim), s->blocks = int(call.blocks);
  s->page = int(call.block_size), s->group = s->heads / s->kv_heads, s->dtype = int(call.x_type);
  s->window = call.window <= 0 ? 0 : call.window < INT_MAX ? int(call.window) : INT_MAX;
  s->scale = float(call.scale), s->softcap = float(call.softcap);
  s->codes = call.k_scale != nullptr, s->bytes = s->codes ? 1 : 2;
  s->by_token = s->codes && call.scale_blocks * call.scale_slots > 1;
  if (s->codes != (call.v_scale != nullptr)) return GM_E_ARG;
  return s->scale > 0.f && s->softcap >= 0.f ? GM_OK : GM_E_ARG;
}

// Whether rows of q, of out and of both caches begin at multiples of 16 bytes, by strides that are not negative.
inline bool paged_rows_copyable(const GmPagedAttentionCall& call, int bytes) {
  return rows_copyable(call.q, call.q_stride, 2, 2) && rows_copyable(call.out, call.out_stride, 2, 2) &&
         rows_copyable(call.k_cache, call.k_cache_stride, 3, bytes) &&
         rows_copyable(call.v_cache, call.v_cache_stride, 3, bytes);
}

template <typename T>
T* at(void* workspace, int64_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(workspace) + offset);
}

// The parameters of the kernels for any batch, without what depends on how keys are copied. rows, keys: of a
// tile. o: options of the entry, whose part_tiles has 128 keys each.
template <typename Params, typename Options>
Params attention_params(const GmPagedAttentionCall& call, const PagedSizes& s, const Options& o, int rows,
                        int keys) {
  Params p{};
  p.out = call.out, p.lse = static_cast<float*>(call.lse), p.sinks = static_cast<const float*>(call.sinks);
  p.table = static_cast<const int*>(call.block_table);
  p.query_start = static_cast<const int*>(call.query_start);
  p.seq_lens = static_cast<const int*>(call.seq_lens);
  p.counters = at<unsigned>(call.workspace, o.counters_at), p.units = at<float>(call.workspace, o.parts_at);
  p.unit_count = int(o.units);
  p.out_token = call.out_stride[0], p.out_head = call.out_stride[1];
  p.table_row = call.block_table_stride[0];
  p.seqs = s.seqs, p.heads = s.heads, p.kv_heads = s.kv_heads, p.head_dim = s.head_dim, p.group = s.group;
  p.tile_q = rows / s.group, p.window = s.window, p.blocks = s.blocks, p.page = s.page;
  p.part_tiles = o.part_tiles > 0 ? int(o.part_tiles * 128 / keys) : INT_MAX;
  p.shared_rows = o.part_tiles > 0 ? 64 : 0;
  p.reading = int(o.reading), p.by_page = 0xffffffffu / unsigned(s.page),
  p.by_group = (65536 + s.group - 1) / s.group;
  p.by_tile_q = 0xffffffffu / unsigned(p.tile_q), p.by_kv_heads = 0xffffffffu / unsigned(s.kv_heads);
  p.columns = call.max_blocks < INT_MAX ? int(call.max_blocks) : INT_MAX;
  p.scale = s.scale, p.score_scale = s.scale * 1.4426950408889634f;
  return p;
}

// The scales of caches of codes, and what depends on the dtypes.
template <typename Params>
void set_scales(const GmPagedAttentionCall& call, const PagedSizes& s, Params* p) {
  p->k_scale = static_cast<const float*>(call.k_scale), p->v_scale = static_cast<const float*>(call.v_scale);
  p->k_scale_block = scale_stride(call.scale_blocks, call.k_scale_stride[0]);
  p->k_scale_slot = scale_stride(call.scale_slots, call.k_scale_stride[1]);
  p->k_scale_head = scale_stride(call.scale_heads, call.k_scale_stride[2]);
  p->v_scale_block = scale_stride(call.scale_blocks, call.v_scale_stride[0]);
  p->v_scale_slot = scale_stride(call.scale_slots, call.v_scale_stride[1]);
  p->v_scale_head = scale_stride(call.scale_heads, call.v_scale_stride[2]);
  p->by_token = s.by_token, p->bf16 = s.dtype == 2;
}

// Whether options are ones that the kernels for any batch take.
template <typename Options>
bool takes_options(const PagedSizes& s, const Options& o) {
  return s.group <= 128 && o.ctas >= 1 && o.ctas <= INT_MAX && o.reading >= 1 && o.reading <= INT_MAX &&
         o.units >= 0 && o.units <= INT_MAX && (o.prompt_rows == 128 || o.prompt_rows == 192) &&
         o.part_tiles >= 0 && o.part_tiles <= INT_MAX / 2;
}

}  // namespace gm
#endif
