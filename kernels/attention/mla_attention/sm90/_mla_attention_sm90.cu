// Latent attention for Hopper: the kernels by dtype and how pages are copied, and their entry point.
#include "_mla_attention_sm90.cuh"
#include "attention/sm90/_attention_host_sm90.h"
#include "calls/mla_attention.h"

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

// Sequences times the longest context, 300 MB of keys, up to which L2 fetches 256 bytes at a time. From some 600 MB on the
// speed of the memory counts, and with 128 bytes it is 2 to 3 % higher on an H200; with less, 256 bytes are 1 to 3 % faster.
constexpr int64_t kCachedKeys = 1 << 18;

}  // namespace

// A token of q is `heads` heads, one after the other. scale > 0. workspace: kCounterBytes bytes that are zero, and
// are zero again after the launch, then kPartBytes for each of 2 * ctas parts of a context, unless none is cut.
// least, slack: see MlaParams. GM_E_SHAPE for strides that are none of 16-byte chunks.
GM_CUDA_CALL(gm_mla_attention_sm90, MlaAttention, ctas, least, slack)
(const GmMlaAttentionCall& call, const gm_mla_attention_sm90_options& o, int device, void* stream) {
  using S = gm::mla::MlaShape;
  if (call.x_type != 1 && call.x_type != 2) return GM_E_DTYPE;
  const int64_t tokens = call.q_tokens, heads = call.heads, blocks = call.blocks;
  if (tokens < 0 || call.seqs < 1 || call.seqs > INT32_MAX || heads < 1 || call.block_size < 1 ||
      call.block_size > INT32_MAX || blocks < 0 || blocks > INT32_MAX || call.max_q < 1 || call.max_ctx < 1 ||
      call.max_ctx > INT32_MAX || tokens > INT32_MAX / heads)
    return GM_E_SHAPE;
  const float scale = float(call.scale);
  if (!(scale > 0.f) || o.ctas < 1 || o.ctas > gm::mla::kMaxCtas || o.least < 1 || o.least > INT32_MAX)
    return GM_E_ARG;
  if (tokens == 0) return GM_OK;
  if ((tokens * heads / S::kRows + call.seqs) * (call.max_ctx / S::kKeys + 1) > INT32_MAX) return GM_E_SHAPE;
  if (!gm::rows_copyable(call.q, call.q_stride + 1, 1, 2) ||
      !gm::rows_copyable(call.out, call.out_stride, 2, 2) ||
      !gm::rows_copyable(call.cache, call.cache_stride, 2, 2))
    return GM_E_SHAPE;

  const int page = int(call.block_size), ctas = int(o.ctas);
  const bool boxes = page % 8 == 0;
  const int64_t max_rows = (call.max_q < tokens ? call.max_q : tokens) * heads;
  Instance* instance = nullptr;
  for (Instance& i : g_instances)
    if (i.dtype == call.x_type && i.boxes == boxes) instance = &i;

  gm::mla::MlaParams p{};
  p.out = call.out, p.lse = static_cast<float*>(call.lse);
  p.table = static_cast<const int*>(call.block_table);
  p.query_start = static_cast<const int*>(call.query_start),
  p.seq_lens = static_cast<const int*>(call.seq_lens);
  p.counters = static_cast<unsigned*>(call.workspace);
  p.part_sums = reinterpret_cast<float*>(static_cast<uint8_t*>(call.workspace) + gm::mla::kCounterBytes);
  p.parts = p.part_sums + 2 * ctas * S::kRows * 2;
  p.cache = call.cache;
  p.out_token = call.out_stride[0], p.out_head = call.out_stride[1];
  p.cache_block = call.cache_stride[0], p.cache_slot = call.cache_stride[1];
  p.table_row = call.block_table_stride[0];
  p.seqs = int(call.seqs), p.heads = int(heads), p.blocks = int(blocks), p.page = page;
  p.q_rows = max_rows < S::kRows ? int(max_rows + 7) / 8 * 8 : S::kRows;
  p.least = int(o.least), p.slack = int(o.slack);
  p.by_page = gm::reciprocal(page), p.by_heads = gm::reciprocal(p.heads);
  p.scale_log2 = scale * 1.4426950408889634f;

  CUtensorMap maps[3] = {};
  const CUtensorMapDataType type = gm::float16_type(call.x_type == 2);
  const cuuint64_t q_sizes[] = {S::kWidth, cuuint64_t(tokens) * heads},
                   q_bytes[] = {cuuint64_t(call.q_stride[1]) * 2};
  const cuuint32_t q_box[] = {64, cuuint32_t(p.q_rows)};
  int status = gm::tensor_map(&maps[0], type, 2, call.q, q_sizes, q_bytes, q_box);
  if (boxes) {
    const int even = page & -page;
    p.box = even < S::kKeys ? even : S::kKeys;
    const cuuint64_t slot = cuuint64_t(p.cache_slot) * 2, block = cuuint64_t(p.cache_block) * 2;
    const cuuint64_t sizes[] = {64, 8, 9, cuuint64_t(page) / 8, cuuint64_t(blocks > 0 ? blocks : 1)};
    const cuuint64_t bytes[] = {slot, 128, 8 * slot, block > 0 ? block : 16};
    const cuuint32_t half[] = {64, 8, 4, cuuint32_t(p.box) / 8, 1}, rotated[] = {64, 8, 1, half[3], 1};
    const auto fetch = call.seqs * call.max_ctx > kCachedKeys ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B
                                                              : CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
    if (status == GM_OK) status = gm::tensor_map(&maps[1], type, 5, call.cache, sizes, bytes, half, fetch);
    if (status == GM_OK) status = gm::tensor_map(&maps[2], type, 5, call.cache, sizes, bytes, rotated, fetch);
  }
  if (status != GM_OK) return status;
  void* args[] = {&p, &maps[0], &maps[1], &maps[2]};
  return instance->kernel.launch(device, stream,
                                 {.grid_x = unsigned(ctas), .block = S::kThreads, .smem = S::kBytes}, args);
}

#endif
