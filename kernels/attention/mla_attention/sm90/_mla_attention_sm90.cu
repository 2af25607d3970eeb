// Latent attention for Hopper: the kernels by dtype and how pages are copied, and their entry point.
#include "_mla_attention_sm90.cuh"
#include "attention/sm90/_attention_host_sm90.h"

#define GM_EACH(K)                       \
  K(bf16, 2, __nv_bfloat16, boxes, true) \
  K(bf16, 2, __nv_bfloat16, rows, false) \
  K(fp16, 1, __half, boxes, true)        \
  K(fp16, 1, __half, rows, false)

#ifdef __CUDACC__

#define GM_ONE(type, code, T, label, BOXES)                                                        \
  extern "C" __global__ void __launch_bounds__(gm::mla::MlaShape::kThreads, 1)                     \
      mla_attention_##type##_##label(                                                              \
          const __grid_constant__ gm::mla::MlaParams p, const __grid_constant__ CUtensorMap q,     \
          const __grid_constant__ CUtensorMap half, const __grid_constant__ CUtensorMap rotated) { \
    gm::mla::mla_attention<T, BOXES>(p, q, half, rotated);                                         \
  }
GM_EACH(GM_ONE)

#else

namespace {

struct Instance {
  int dtype;
  bool boxes;
  gm::CudaKernel kernel;
};

#define GM_ONE(type, code, T, label, boxes) {code, boxes, {GM_CUBIN, "mla_attention_" #type "_" #label}},
Instance g_instances[] = {GM_EACH(GM_ONE)};

}  // namespace

// strides, in elements: q head, out token, out head, cache block, cache slot, block_table row; a token of q
// is `heads` heads. dtype 1 is fp16, 2 bf16. lse may be null. workspace: kMlaCounters words that are zero,
// and are zero again after the launch, and 131,584 bytes for each of 2 * ctas parts of a context behind 4,096
// bytes. max_q, max_ctx: bounds on the new tokens and the context of a sequence. scale > 0. least, slack: see
// MlaParams. GM_E_SHAPE for strides that are none of 16-byte chunks.
GM_CUDA_ENTRY(gm_mla_attention_sm90)
(void* out, void* lse, const void* q, const void* cache, const void* table, const void* query_start,
 const void* seq_lens, void* workspace, const int64_t* strides, int tokens, int seqs, int heads, int blocks,
 int page, int dtype, int max_q, int max_ctx, float scale, int ctas, int least, int slack, int device,
 void* stream) {
  using S = gm::mla::MlaShape;
  if (dtype != 1 && dtype != 2) return GM_E_DTYPE;
  if (tokens < 0 || seqs < 1 || heads < 1 || page < 1 || blocks < 0 || max_q < 1 || max_ctx < 1 ||
      int64_t(tokens) * heads > INT32_MAX)
    return GM_E_SHAPE;
  if (!(scale > 0.f) || ctas < 1 || ctas > gm::mla::kMostCtas || least < 1) return GM_E_ARG;
  if (tokens == 0) return GM_OK;
  if ((int64_t(tokens) * heads / S::kRows + seqs) * (max_ctx / S::kKeys + 1) > INT32_MAX) return GM_E_SHAPE;
  if (!gm::rows_copyable(q, strides, 1, 2) || !gm::rows_copyable(out, strides + 1, 2, 2) ||
      !gm::rows_copyable(cache, strides + 3, 2, 2))
    return GM_E_SHAPE;
  static_assert(gm::mla::kMlaCounters * 4 <= 4096);

  const bool boxes = page % 8 == 0;
  const int64_t most_rows = int64_t(max_q < tokens ? max_q : tokens) * heads;
  Instance* instance = nullptr;
  for (Instance& i : g_instances)
    if (i.dtype == dtype && i.boxes == boxes) instance = &i;

  gm::mla::MlaParams p{};
  p.out = out, p.lse = static_cast<float*>(lse), p.table = static_cast<const int*>(table);
  p.query_start = static_cast<const int*>(query_start), p.seq_lens = static_cast<const int*>(seq_lens);
  p.counters = static_cast<unsigned*>(workspace);
  p.part_sums = static_cast<float*>(workspace) + 1024;
  p.parts = p.part_sums + 2 * ctas * S::kRows * 2;
  p.cache = cache;
  p.out_token = strides[1], p.out_head = strides[2], p.cache_block = strides[3], p.cache_slot = strides[4];
  p.table_row = strides[5];
  p.seqs = seqs, p.heads = heads, p.blocks = blocks, p.page = page;
  p.q_rows = most_rows < S::kRows ? int(most_rows + 7) / 8 * 8 : S::kRows;
  p.least = least, p.slack = slack;
  p.by_page = gm::reciprocal(page), p.by_heads = gm::reciprocal(heads);
  p.scale_log2 = scale * 1.4426950408889634f;

  CUtensorMap maps[3] = {};
  const CUtensorMapDataType type = gm::float16_type(dtype == 2);
  const cuuint64_t q_sizes[] = {576, cuuint64_t(tokens) * heads}, q_bytes[] = {cuuint64_t(strides[0]) * 2};
  const cuuint32_t q_box[] = {64, cuuint32_t(p.q_rows)};
  int status = gm::tensor_map(&maps[0], type, 2, q, q_sizes, q_bytes, q_box);
  if (boxes) {
    const int even = page & -page;
    p.box = even < S::kKeys ? even : S::kKeys;
    const cuuint64_t slot = cuuint64_t(p.cache_slot) * 2, block = cuuint64_t(p.cache_block) * 2;
    const cuuint64_t sizes[] = {64, 8, 9, cuuint64_t(page) / 8, cuuint64_t(blocks > 0 ? blocks : 1)};
    const cuuint64_t bytes[] = {slot, 128, 8 * slot, block > 0 ? block : 16};
    const cuuint32_t half[] = {64, 8, 4, cuuint32_t(p.box) / 8, 1}, rotated[] = {64, 8, 1, half[3], 1};
    if (status == GM_OK) status = gm::tensor_map(&maps[1], type, 5, cache, sizes, bytes, half);
    if (status == GM_OK) status = gm::tensor_map(&maps[2], type, 5, cache, sizes, bytes, rotated);
  }
  if (status != GM_OK) return status;
  void* args[] = {&p, &maps[0], &maps[1], &maps[2]};
  return instance->kernel.launch(device, stream,
                                 {.grid_x = unsigned(ctas), .block = S::kThreads, .smem = S::kBytes}, args);
}

#endif
