// Paged attention for Hopper with heads of more than 128 elements: the kernels by dtype and soft cap, and
// their entry point.
#include "_paged_attention_sm90.cuh"
#include "attention/sm90/_attention_host_sm90.h"

#include <climits>

#define GM_EACH(K)          \
  K(bf16, 2, __nv_bfloat16) \
  K(fp16, 1, __half)

#ifdef __CUDACC__

#define GM_ONE(type, code, T)                                                                                \
  extern "C" __global__ void __launch_bounds__(gm::AttentionShape<256>::kThreads, 1)                         \
      paged_wide_##type##_d256(const __grid_constant__ gm::AttentionParams p,                                \
                               const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k, \
                               const __grid_constant__ CUtensorMap v) {                                      \
    gm::paged_attention<T, 256, gm::kBoxCopies, false>(p, q, k, v, {});                                      \
  }                                                                                                          \
  extern "C" __global__ void __launch_bounds__(gm::AttentionShape<256>::kThreads, 1)                         \
      paged_wide_##type##_d256_cap(                                                                          \
          const __grid_constant__ gm::AttentionParams p, const __grid_constant__ CUtensorMap q,              \
          const __grid_constant__ CUtensorMap k, const __grid_constant__ CUtensorMap v,                      \
          const __grid_constant__ gm::SoftCap<true> cap) {                                                   \
    gm::paged_attention<T, 256, gm::kBoxCopies, true>(p, q, k, v, cap);                                      \
  }
GM_EACH(GM_ONE)

#else

namespace {

struct Instance {
  int dtype;  // of q, out and the caches
  gm::CudaKernel plain, capped;
};

#define GM_ONE(type, code, T) \
  {code, {GM_CUBIN, "paged_wide_" #type "_d256"}, {GM_CUBIN, "paged_wide_" #type "_d256_cap"}},
Instance g_instances[] = {GM_EACH(GM_ONE)};

}  // namespace

// As gm_paged_attention_sm90, for caches of q's dtype, a head_dim of a multiple of 8 from 136 to 256 and a
// page of a multiple of 8 tokens. strides, in elements: q token, q head, out token, out head, k block, k
// slot, k head, v block, v slot, v head, block_table row. dtype: 1 is fp16, 2 bf16. lse and sinks may be
// null. counters: 32 + `units` integers that are zero, and are zero again after the launch. parts: (units + 4
// ctas) 33 512 bytes. scale > 0. part_tiles: tiles of 64 keys of a part of a context; 0: one warpgroup
// adds all keys of a row. softcap >= 0, 0: none. reading: weight of a tile of decode against one of prefill,
// in eighths. device < 0 asks for the bytes of shared memory.
GM_CUDA_ENTRY(gm_paged_wide_sm90)
(void* out, void* lse, const void* q, const void* k, const void* v, const void* table,
 const void* query_start, const void* seq_lens, const void* sinks, void* counters, void* parts,
 const int64_t* strides, int units, int tokens, int seqs, int heads, int kv_heads, int head_dim, int blocks,
 int page, int dtype, int window, float scale, float softcap, int part_tiles, int reading, int ctas,
 int device, void* stream) {
  using Shape = gm::AttentionShape<256>;
  Instance* instance = nullptr;
  for (Instance& i : g_instances)
    if (i.dtype == dtype) instance = &i;
  if (instance == nullptr) return GM_E_DTYPE;
  if (tokens < 0 || seqs < 1 || kv_heads < 1 || heads < 1 || heads % kv_heads != 0 || page < 1 ||
      page % 8 != 0 || blocks < 0 || head_dim <= 128 || head_dim > 256 || head_dim % 8 != 0)
    return GM_E_SHAPE;
  const int group = heads / kv_heads;
  if (group > 128 || !(scale > 0.f) || !(softcap >= 0.f) || ctas < 1 || reading < 1 || units < 0 ||
      part_tiles < 0)
    return GM_E_ARG;
  if (device < 0) return Shape::kBytes;
  if (tokens == 0) return GM_OK;
  if (!gm::rows_copyable(q, strides, 2, 2) || !gm::rows_copyable(out, strides + 2, 2, 2) ||
      !gm::rows_copyable(k, strides + 4, 3, 2) || !gm::rows_copyable(v, strides + 7, 3, 2))
    return GM_E_SHAPE;

  const int box = (page & -page) < Shape::kKeys ? page & -page : Shape::kKeys;
  gm::AttentionParams p{};
  p.out = out, p.lse = static_cast<float*>(lse), p.sinks = static_cast<const float*>(sinks);
  p.table = static_cast<const int*>(table), p.query_start = static_cast<const int*>(query_start);
  p.seq_lens = static_cast<const int*>(seq_lens), p.counters = static_cast<unsigned*>(counters);
  p.units = static_cast<float*>(parts), p.unit_count = units;
  p.out_token = strides[2], p.out_head = strides[3], p.table_row = strides[10];
  p.seqs = seqs, p.heads = heads, p.kv_heads = kv_heads, p.group = group, p.tile_q = Shape::kRows / group;
  p.part_tiles = part_tiles > 0 ? part_tiles : INT_MAX, p.shared_rows = part_tiles > 0 ? 64 : 0;
  p.window = window, p.reading = reading, p.blocks = blocks, p.page = page;
  p.by_page = gm::reciprocal(page), p.by_group = (65536 + group - 1) / group;
  p.scale = scale, p.score_scale = scale * 1.4426950408889634f;
  p.scale_log2 = softcap > 0.f ? 1.f : p.score_scale;
  p.head_dim = head_dim, p.box = box, p.log_boxes = __builtin_ctz(unsigned(Shape::kKeys / box));

  CUtensorMap maps[3] = {};
  const cuuint64_t q_sizes[] = {cuuint64_t(head_dim), cuuint64_t(heads), cuuint64_t(tokens)};
  const int64_t q_strides[] = {strides[1], strides[0]};
  const cuuint32_t q_box[] = {64, cuuint32_t(group), cuuint32_t(p.tile_q)};
  const cuuint64_t sizes[] = {cuuint64_t(head_dim), cuuint64_t(page), cuuint64_t(kv_heads),
                              cuuint64_t(blocks > 0 ? blocks : 1)};
  const cuuint32_t kv_box[] = {64, cuuint32_t(box), 1, 1};
  const int64_t k_strides[] = {strides[5], strides[6], strides[4]},
                v_strides[] = {strides[8], strides[9], strides[7]};
  int status = gm::heads_map(&maps[0], q, dtype == 2, 3, q_sizes, q_strides, q_box);
  if (status == GM_OK) status = gm::heads_map(&maps[1], k, dtype == 2, 4, sizes, k_strides, kv_box);
  if (status == GM_OK) status = gm::heads_map(&maps[2], v, dtype == 2, 4, sizes, v_strides, kv_box);
  if (status != GM_OK) return status;
  // An upper bound of the work tiles of a batch of as many tokens.
  const int64_t most =
      (int64_t(tokens) / p.tile_q + int64_t(seqs) * (units > 0 ? gm::kMostParts : 1)) * kv_heads;
  gm::SoftCap<true> cap = gm::soft_cap(softcap, scale);
  void* args[] = {&p, &maps[0], &maps[1], &maps[2], &cap};  // the last one is of capped kernels
  gm::CudaKernel& kernel = softcap > 0.f ? instance->capped : instance->plain;
  return kernel.launch(device, stream,
                       {.grid_x = unsigned(most < ctas ? most : ctas),
                        .block = Shape::kThreads,
                        .smem = unsigned(Shape::kBytes),
                        .pdl = true},
                       args);
}

#endif
