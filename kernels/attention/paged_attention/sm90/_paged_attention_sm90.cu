// Paged attention for Hopper: the kernels by dtype, head size,
// how pages are copied and soft cap, and their entry point.
#include "_paged_attention_sm90.cuh"
#include "attention/sm90/_attention_host_sm90.h"

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
  K(codes, 0, __half, 128, any, gm::kCodeCopies)        \
  K(codes, 0, __half, 64, any, gm::kCodeCopies)

#ifdef __CUDACC__

#define GM_ONE(type, code, T, d, label, COPIES)                                                 \
  extern "C" __global__ void __launch_bounds__(gm::AttentionShape<d>::kThreads, 1)              \
      paged_attention_##type##_d##d##_##label(                                                  \
          const __grid_constant__ gm::AttentionParams p, const __grid_constant__ CUtensorMap q, \
          const __grid_constant__ CUtensorMap k, const __grid_constant__ CUtensorMap v) {       \
    gm::paged_attention<T, d, COPIES, false>(p, q, k, v, {});                                   \
  }                                                                                             \
  extern "C" __global__ void __launch_bounds__(gm::AttentionShape<d>::kThreads, 1)              \
      paged_attention_##type##_d##d##_##label##_cap(                                            \
          const __grid_constant__ gm::AttentionParams p, const __grid_constant__ CUtensorMap q, \
          const __grid_constant__ CUtensorMap k, const __grid_constant__ CUtensorMap v,         \
          const __grid_constant__ gm::SoftCap<true> cap) {                                      \
    gm::paged_attention<T, d, COPIES, true>(p, q, k, v, cap);                                   \
  }
GM_EACH(GM_ONE)

#else

namespace {

struct Instance {
  int dtype, head_dim;  // dtype: of q, out and the caches; 0 where the caches hold codes
  gm::Copies copies;
  unsigned smem;
  gm::CudaKernel plain, capped;
};

#define GM_ONE(type, code, T, d, label, COPIES)             \
  {code,                                                    \
   d,                                                       \
   COPIES,                                                  \
   gm::AttentionShape<d>::kBytes,                           \
   {GM_CUBIN, "paged_attention_" #type "_d" #d "_" #label}, \
   {GM_CUBIN, "paged_attention_" #type "_d" #d "_" #label "_cap"}},
Instance g_instances[] = {GM_EACH(GM_ONE)};

}  // namespace

// strides, in elements: q token, q head, out token, out head, k block, k slot, k head, v block, v slot, v
// head, block_table row, k_scale by block, slot and head, v_scale likewise (0 for a scale in common). k_scale
// and v_scale null: caches of q's dtype; else of e4m3 codes, by_token with a scale per token and head.
// head_dim: a multiple of 8, of 16 for codes, up to 128. dtype: of q and out, 1 is fp16, 2 bf16. lse and
// sinks may be null. counters: 32 + `units` integers that are zero, and are zero again after the launch.
// parts: (units + 4 ctas) (dim / 8 + 1) 512 bytes, dim: 64 or 128. scale > 0. part_tiles: tiles of 128 keys
// of a part of a context; 0: one warpgroup adds all keys of a row, in one order whatever the batch is.
// softcap >= 0, 0: none. reading: weight of a tile of decode against one of prefill,
// in eighths. Everything but the last dimensions' contiguity is checked: rows of 16-byte chunks (GM_E_SHAPE
// otherwise). device < 0 asks for the bytes of shared memory.
GM_CUDA_ENTRY(gm_paged_attention_sm90)
(void* out, void* lse, const void* q, const void* k, const void* v, const void* table,
 const void* query_start, const void* seq_lens, const void* sinks, const void* k_scale, const void* v_scale,
 void* counters, void* parts, const int64_t* strides, int units, int tokens, int seqs, int heads,
 int kv_heads, int head_dim, int blocks, int page, int dtype, int by_token, int window, float scale,
 float softcap, int part_tiles, int reading, int ctas, int device, void* stream) {
  if (dtype != 1 && dtype != 2) return GM_E_DTYPE;
  if (tokens < 0 || seqs < 1 || kv_heads < 1 || heads < 1 || heads % kv_heads != 0 || page < 1 || blocks < 0)
    return GM_E_SHAPE;
  const int group = heads / kv_heads;
  if (group > 128 || !(scale > 0.f) || !(softcap >= 0.f) || ctas < 1 || reading < 1 || units < 0 ||
      part_tiles < 0)
    return GM_E_ARG;
  const bool codes = k_scale != nullptr;
  if (codes != (v_scale != nullptr)) return GM_E_ARG;
  const int bytes = codes ? 1 : 2;
  const int box = page % 8 == 0 && !codes ? (page & -page) < 128 ? page & -page : 128 : 0;
  const gm::Copies copies = codes ? gm::kCodeCopies : box > 0 ? gm::kBoxCopies : gm::kRowCopies;
  Instance* instance = nullptr;
  for (Instance& i : g_instances)
    if (i.dtype == (codes ? 0 : dtype) && i.head_dim == (head_dim <= 64 ? 64 : 128) && i.copies == copies)
      instance = &i;
  if (instance == nullptr || head_dim < 8 || head_dim > 128 || head_dim * bytes % 16 != 0) return GM_E_SHAPE;
  if (device < 0) return int(instance->smem);
  if (tokens == 0) return GM_OK;
  if (!gm::rows_copyable(q, strides, 2, 2) || !gm::rows_copyable(out, strides + 2, 2, 2) ||
      !gm::rows_copyable(k, strides + 4, 3, bytes) || !gm::rows_copyable(v, strides + 7, 3, bytes))
    return GM_E_SHAPE;

  gm::AttentionParams p{};
  p.out = out, p.lse = static_cast<float*>(lse), p.sinks = static_cast<const float*>(sinks);
  p.table = static_cast<const int*>(table), p.query_start = static_cast<const int*>(query_start);
  p.seq_lens = static_cast<const int*>(seq_lens), p.counters = static_cast<unsigned*>(counters);
  p.units = static_cast<float*>(parts), p.unit_count = units;
  p.k = k, p.v = v;
  p.out_token = strides[2], p.out_head = strides[3];
  p.k_block = strides[4], p.k_slot = strides[5], p.k_head = strides[6];
  p.v_block = strides[7], p.v_slot = strides[8], p.v_head = strides[9], p.table_row = strides[10];
  p.seqs = seqs, p.heads = heads, p.kv_heads = kv_heads, p.group = group, p.tile_q = 128 / group;
  p.part_tiles = part_tiles > 0 ? part_tiles : INT_MAX, p.shared_rows = part_tiles > 0 ? 64 : 0;
  p.window = window, p.reading = reading, p.blocks = blocks, p.page = page, p.by_page = gm::reciprocal(page);
  p.by_group = (65536 + group - 1) / group;
  p.scale = scale, p.score_scale = scale * 1.4426950408889634f,
  p.scale_log2 = codes || softcap > 0.f ? 1.f : p.score_scale;
  p.k_scale = static_cast<const float*>(k_scale), p.v_scale = static_cast<const float*>(v_scale);
  p.k_scale_block = strides[11], p.k_scale_slot = strides[12], p.k_scale_head = strides[13];
  p.v_scale_block = strides[14], p.v_scale_slot = strides[15], p.v_scale_head = strides[16];
  p.by_token = by_token != 0, p.bf16 = dtype == 2, p.head_dim = head_dim;

  CUtensorMap maps[3] = {};
  const cuuint64_t q_sizes[] = {cuuint64_t(head_dim), cuuint64_t(heads), cuuint64_t(tokens)};
  const int64_t q_strides[] = {strides[1], strides[0]};
  const cuuint32_t q_box[] = {64, cuuint32_t(group), cuuint32_t(p.tile_q)};
  int status = gm::heads_map(&maps[0], q, dtype == 2, 3, q_sizes, q_strides, q_box);
  if (box > 0) {
    p.box = box, p.log_boxes = __builtin_ctz(unsigned(128 / box));
    const cuuint64_t sizes[] = {cuuint64_t(head_dim), cuuint64_t(page), cuuint64_t(kv_heads),
                                cuuint64_t(blocks > 0 ? blocks : 1)};
    const cuuint32_t kv_box[] = {64, cuuint32_t(box), 1, 1};
    const int64_t k_strides[] = {p.k_slot, p.k_head, p.k_block},
                  v_strides[] = {p.v_slot, p.v_head, p.v_block};
    if (status == GM_OK) status = gm::heads_map(&maps[1], k, dtype == 2, 4, sizes, k_strides, kv_box);
    if (status == GM_OK) status = gm::heads_map(&maps[2], v, dtype == 2, 4, sizes, v_strides, kv_box);
  }
  if (status != GM_OK) return status;
  // An upper bound of the work tiles of a batch of as many tokens.
  const int64_t most =
      (int64_t(tokens) / p.tile_q + int64_t(seqs) * (units > 0 ? gm::kMostParts : 1)) * kv_heads;
  gm::SoftCap<true> cap = gm::soft_cap(softcap, codes ? 0.f : scale);
  void* args[] = {&p, &maps[0], &maps[1], &maps[2], &cap};  // the last one is of capped kernels
  gm::CudaKernel& kernel = softcap > 0.f ? instance->capped : instance->plain;
  return kernel.launch(device, stream,
                       {.grid_x = unsigned(most < ctas ? most : ctas),
                        .block = gm::AttentionShape<128>::kThreads,
                        .smem = instance->smem,
                        .pdl = true},
                       args);
}

#endif
