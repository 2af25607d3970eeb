// Paged attention for Hopper: the kernels by dtype, head size,
// how pages are copied and soft cap, and their entry point.
#include "_paged_attention_sm90.cuh"
#include "_paged_host_sm90.h"

#include <climits>

#define GM_EACH(K)                                      \
  K(bf16, 2, __nv_bfloat16, 128, boxes, gm::kBoxCopies) \
  K(bf16, 2, __nv_bfloat16, 128, rows, gm::kRowCopies)  \
  K(fp16, 1, __half, 128, boxes, gm::kBoxCopies)        \
  K(fp16, 1, __half, 128, rows, gm::kRowCopies)         \
  K(bf16, 2, __nv_bfloat16, 64, boxes, gm::kBoxCopies)  \
  K(bf16, 2, __nv_bfloat16, 64, rows, gm::kRowCopies)   \
  K(fp16, 1, __half, 64, boxes, gm::kBoxCopies)         \
  K(fp16, 1, __half, 64, rows, gm::kRowCopies)          \
  K(bf16, 2, __nv_bfloat16, 256, boxes, gm::kBoxCopies) \
  K(fp16, 1, __half, 256, boxes, gm::kBoxCopies)        \
  K(codes, 0, __half, 128, any, gm::kCodeCopies)        \
  K(codes, 0, __half, 64, any, gm::kCodeCopies)

// Three consumer warpgroups, for batches of prompts with small heads.
#define GM_EACH_PROMPTS(K)      \
  K(bf16, 2, __nv_bfloat16, 64) \
  K(fp16, 1, __half, 64)

#ifdef __CUDACC__

#define GM_ONE(type, code, T, d, label, COPIES)                                                 \
  extern "C" __global__ void __launch_bounds__(gm::AttentionShape<d>::kThreads, 1)              \
      paged_attention_##type##_d##d##_##label(                                                  \
          const __grid_constant__ gm::AttentionParams p, const __grid_constant__ CUtensorMap q, \
          const __grid_constant__ CUtensorMap k, const __grid_constant__ CUtensorMap v) {       \
    gm::paged_attention<T, d, COPIES, false, 2>(p, q, k, v, {});                                \
  }                                                                                             \
  extern "C" __global__ void __launch_bounds__(gm::AttentionShape<d>::kThreads, 1)              \
      paged_attention_##type##_d##d##_##label##_cap(                                            \
          const __grid_constant__ gm::AttentionParams p, const __grid_constant__ CUtensorMap q, \
          const __grid_constant__ CUtensorMap k, const __grid_constant__ CUtensorMap v,         \
          const __grid_constant__ gm::SoftCap<true> cap) {                                      \
    gm::paged_attention<T, d, COPIES, true, 2>(p, q, k, v, cap);                                \
  }
GM_EACH(GM_ONE)

#define GM_PROMPTS(type, code, T, d)                                                            \
  extern "C" __global__ void __launch_bounds__((gm::AttentionShape<d, 3>::kThreads), 1)         \
      paged_prompts_##type##_d##d(                                                              \
          const __grid_constant__ gm::AttentionParams p, const __grid_constant__ CUtensorMap q, \
          const __grid_constant__ CUtensorMap k, const __grid_constant__ CUtensorMap v) {       \
    gm::paged_attention<T, d, gm::kBoxCopies, false, 3>(p, q, k, v, {});                        \
  }
GM_EACH_PROMPTS(GM_PROMPTS)

#else

namespace {

struct Instance {
  int dtype, head_dim;  // dtype: of q, out and the caches; 0 where the caches hold codes
  gm::Copies copies;
  int rows, keys;  // of a tile
  unsigned threads, smem;
  gm::CudaKernel plain, capped;
};

#define GM_ONE(type, code, T, d, label, COPIES)             \
  {code,                                                    \
   d,                                                       \
   COPIES,                                                  \
   gm::AttentionShape<d>::kRows,                            \
   gm::AttentionShape<d>::kKeys,                            \
   gm::AttentionShape<d>::kThreads,                         \
   gm::AttentionShape<d>::kBytes,                           \
   {GM_CUBIN, "paged_attention_" #type "_d" #d "_" #label}, \
   {GM_CUBIN, "paged_attention_" #type "_d" #d "_" #label "_cap"}},
Instance g_instances[] = {GM_EACH(GM_ONE)};

#define GM_PROMPTS(type, code, T, d)           \
  {code,                                       \
   d,                                          \
   gm::kBoxCopies,                             \
   gm::AttentionShape<d, 3>::kRows,            \
   gm::AttentionShape<d, 3>::kKeys,            \
   gm::AttentionShape<d, 3>::kThreads,         \
   gm::AttentionShape<d, 3>::kBytes,           \
   {GM_CUBIN, "paged_prompts_" #type "_d" #d}, \
   {GM_CUBIN, "paged_prompts_" #type "_d" #d}},
Instance g_prompts[] = {GM_EACH_PROMPTS(GM_PROMPTS)};

// The kernel for a call, null if there is none. prompts: whether most of its sequences are.
Instance* find_instance(const gm::PagedSizes& s, bool prompts) {
  const int head_dim = s.head_dim <= 64 ? 64 : s.head_dim <= 128 ? 128 : 256;
  const gm::Copies copies = s.codes ? gm::kCodeCopies : s.page % 8 == 0 ? gm::kBoxCopies : gm::kRowCopies;
  if (s.head_dim < 8 || s.head_dim > 256 || s.head_dim * s.bytes % 16 != 0) return nullptr;
  if (prompts && copies == gm::kBoxCopies && s.softcap == 0.f)
    for (Instance& i : g_prompts)
      if (i.dtype == s.dtype && i.head_dim == head_dim) return &i;
  for (Instance& i : g_instances)
    if (i.dtype == (s.codes ? 0 : s.dtype) && i.head_dim == head_dim && i.copies == copies) return &i;
  return nullptr;
}

}  // namespace

// head_dim: a multiple of 8, of 16 for codes, up to 128; over pages of a multiple of 8 tokens that hold no codes up
// to 256. scale > 0. workspace: at counters_at 32 + `units` integers that are zero, and are zero again after the
// launch; at parts_at (units + 4 ctas) (dim / 8 + 1) 512 bytes, dim: 64, 128 or 256. part_tiles: tiles of 128 keys
// of a part of a context; 0: one warpgroup adds all keys of a row, in one order whatever the batch is. reading:
// weight of a tile of decode against one of prefill, in eighths. prompt_rows: 192 where batches that are mostly prompts
// run in three warpgroups, which take no parts; 128 where none does. GM_E_SHAPE unless rows are whole 16-byte chunks.
// device < 0 asks for the bytes of shared memory.
GM_CUDA_CALL(gm_paged_attention_sm90, PagedAttention, ctas, part_tiles, reading, prompt_rows, units,
             counters_at, parts_at)
(const GmPagedAttentionCall& call, const gm_paged_attention_sm90_options& o, int device, void* stream) {
  gm::PagedSizes s;
  if (const int refused = gm::paged_sizes(call, &s)) return refused;
  if (!gm::takes_options(s, o)) return GM_E_ARG;
  // Sequences that have half the longest one's tokens on average.
  const bool prompts = o.prompt_rows == 192 && int64_t(s.seqs) * call.max_q <= 2 * int64_t(s.tokens);
  Instance* instance = find_instance(s, prompts);
  if (instance == nullptr) return GM_E_SHAPE;
  if (device < 0) return int(instance->smem);
  if (s.tokens == 0) return GM_OK;
  if (!gm::paged_rows_copyable(call, s.bytes)) return GM_E_SHAPE;

  gm::AttentionParams p =
      gm::attention_params<gm::AttentionParams>(call, s, o, instance->rows, instance->keys);
  const bool whole = instance->rows == 192;
  if (whole) p.part_tiles = INT_MAX, p.shared_rows = 0, p.unit_count = 0;
  p.k = call.k_cache, p.v = call.v_cache;
  p.k_block = call.k_cache_stride[0], p.k_slot = call.k_cache_stride[1], p.k_head = call.k_cache_stride[2];
  p.v_block = call.v_cache_stride[0], p.v_slot = call.v_cache_stride[1], p.v_head = call.v_cache_stride[2];
  p.scale_log2 = s.codes || s.softcap > 0.f ? 1.f : p.score_scale;
  gm::set_scales(call, s, &p);

  CUtensorMap maps[3] = {};
  const cuuint64_t q_sizes[] = {cuuint64_t(s.head_dim), cuuint64_t(s.heads), cuuint64_t(s.tokens)};
  const int64_t q_strides[] = {call.q_stride[1], call.q_stride[0]};
  const cuuint32_t q_box[] = {64, cuuint32_t(s.group), cuuint32_t(p.tile_q)};
  int status = gm::heads_map(&maps[0], call.q, s.dtype == 2, 3, q_sizes, q_strides, q_box);
  if (instance->copies == gm::kBoxCopies) {
    const int box = (s.page & -s.page) < instance->keys ? s.page & -s.page : instance->keys;
    p.box = box, p.log_boxes = __builtin_ctz(unsigned(instance->keys / box));
    const cuuint64_t sizes[] = {cuuint64_t(s.head_dim), cuuint64_t(s.page), cuuint64_t(s.kv_heads),
                                cuuint64_t(s.blocks > 0 ? s.blocks : 1)};
    const cuuint32_t kv_box[] = {64, cuuint32_t(box), 1, 1};
    const int64_t k_strides[] = {p.k_slot, p.k_head, p.k_block},
                  v_strides[] = {p.v_slot, p.v_head, p.v_block};
    if (status == GM_OK)
      status = gm::heads_map(&maps[1], call.k_cache, s.dtype == 2, 4, sizes, k_strides, kv_box);
    if (status == GM_OK)
      status = gm::heads_map(&maps[2], call.v_cache, s.dtype == 2, 4, sizes, v_strides, kv_box);
  }
  if (status != GM_OK) return status;
  // 16 rows are the heads of whole tokens, or some heads of one.
  const int box_heads = s.group % 16 == 0 ? 16 : 16 % s.group == 0 ? s.group : 0;
  if (box_heads > 0 && !whole) {
    const int64_t out_strides[] = {call.out_stride[1], call.out_stride[0]};
    const cuuint32_t box[] = {64, cuuint32_t(box_heads), cuuint32_t(16 / box_heads)};
    status = gm::heads_map(&p.out_map, call.out, s.dtype == 2, 3, q_sizes, out_strides, box);
    if (status != GM_OK) return status;
    p.box_heads = box_heads;
  }
  // An upper bound of the work tiles of a batch of as many tokens.
  const int64_t max_tiles =
      (int64_t(s.tokens) / p.tile_q + int64_t(s.seqs) * (o.units > 0 && !whole ? gm::kMaxParts : 1)) *
      s.kv_heads;
  gm::SoftCap<true> cap = gm::soft_cap(s.softcap, s.codes ? 0.f : s.scale);
  void* args[] = {&p, &maps[0], &maps[1], &maps[2], &cap};  // the last one is of capped kernels
  gm::CudaKernel& kernel = s.softcap > 0.f ? instance->capped : instance->plain;
  return kernel.launch(device, stream,
                       {.grid_x = unsigned(max_tiles < o.ctas ? max_tiles : o.ctas),
                        .block = instance->threads,
                        .smem = instance->smem,
                        .pdl = true},
                       args);
}

#endif
