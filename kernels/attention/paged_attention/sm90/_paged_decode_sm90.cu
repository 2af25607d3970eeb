// Paged attention for few rows of each sequence on Hopper:
// the kernels by dtype and head size, and their entry point.
#include "_paged_decode_instances_sm90.cuh"
#include "_paged_host_sm90.h"

#ifdef __CUDACC__

#define GM_ONE(type, code, C, d, n, suffix)                                                 \
  extern "C" __global__ void __launch_bounds__(gm::DecodeShape<d, n, C::kBytes>::kThreads,  \
                                               gm::DecodeShape<d, n, C::kBytes>::kResident) \
      paged_decode_##type##_d##d##suffix(const __grid_constant__ gm::DecodeParams p) {      \
    gm::paged_decode<C, d, n, false>(p, {});                                                \
  }
GM_EACH(GM_ONE)

#else

namespace {

struct Instance {
  int dtype, head_dim, rows;  // dtype: of q, out and the caches; 0 where the caches hold codes
  int resident, step;
  unsigned smem;
  gm::CudaKernel kernel;
};
template <typename S>
constexpr Instance instance_of(int dtype, int head_dim, int rows, gm::CudaKernel kernel) {
  return {dtype, head_dim, rows, S::kResident, S::kStep, S::kBytes, kernel};
}

#define GM_ONE(type, code, C, d, n, suffix)                         \
  instance_of<gm::DecodeShape<d, n, code == 0 ? 1 : 2>>(code, d, n, \
                                                        {GM_CUBIN, "paged_decode_" #type "_d" #d #suffix}),
Instance g_instances[] = {GM_EACH(GM_ONE)};

}  // namespace

// A call of few rows of each sequence: max_q times the query heads of a KV head is at most 16 (8 for codes and
// heads over 128), and KV heads are at most the multiprocessors, which ctas is. No sequence has more than max_q
// new tokens and max_ctx keys. scale > 0. workspace: at counters_at 2 ctas integers that are zero, and are zero
// again after the launch; at parts_at 4 ctas (head_dim + 2) 64 bytes. device < 0 asks for the bytes of shared
// memory.
GM_CUDA_CALL(gm_paged_decode_sm90, PagedAttention, ctas, counters_at, parts_at)
(const GmPagedAttentionCall& call, const gm_paged_decode_sm90_options& o, int device, void* stream) {
  gm::PagedSizes s;
  if (const int refused = gm::paged_sizes(call, &s)) return refused;
  if (call.max_q < 1) return GM_E_SHAPE;
  if (call.max_q > 16 || call.max_q * s.group > 16 || o.ctas < 1 || o.ctas > INT_MAX / 64 || call.max_ctx < 1)
    return GM_E_ARG;
  const int64_t rows = call.max_q * s.group;
  Instance* instance = nullptr;
  for (Instance& i : g_instances)
    if (i.dtype == (s.codes ? 0 : s.dtype) && i.head_dim == s.head_dim && i.rows == (rows > 8 ? 16 : 8))
      instance = &i;
  if (instance == nullptr) return GM_E_SHAPE;
  if (device < 0) return int(instance->smem);
  if (s.tokens == 0) return GM_OK;
  const int64_t *const k = call.k_cache_stride, *const v = call.v_cache_stride;
  if (!gm::rows_aligned(call.q, call.q_stride, 2, 2) || !gm::rows_aligned(call.out, call.out_stride, 2, 2) ||
      !gm::rows_aligned(call.k_cache, k, 3, s.bytes) || !gm::rows_aligned(call.v_cache, v, 3, s.bytes) ||
      k[1] >= 1 << 30 || v[1] >= 1 << 30)
    return GM_E_SHAPE;

  gm::DecodeParams p{};
  p.out = call.out, p.lse = static_cast<float*>(call.lse), p.sinks = static_cast<const float*>(call.sinks);
  p.table = static_cast<const int*>(call.block_table);
  p.query_start = static_cast<const int*>(call.query_start);
  p.seq_lens = static_cast<const int*>(call.seq_lens);
  p.counters = gm::at<unsigned>(call.workspace, o.counters_at);
  p.parts = gm::at<float>(call.workspace, o.parts_at);
  p.q = call.q, p.k = call.k_cache, p.v = call.v_cache;
  p.q_token = call.q_stride[0] * 2, p.q_head = call.q_stride[1] * 2;
  p.out_token = call.out_stride[0], p.out_head = call.out_stride[1];
  p.table_row = call.block_table_stride[0];
  p.k_block = k[0] * s.bytes, p.k_slot = int(k[1] * s.bytes), p.k_head = k[2] * s.bytes;
  p.v_block = v[0] * s.bytes, p.v_slot = int(v[1] * s.bytes), p.v_head = v[2] * s.bytes;
  p.seqs = s.seqs, p.heads = s.heads, p.kv_heads = s.kv_heads, p.head_dim = s.head_dim, p.group = s.group;
  p.window = s.window, p.page = s.page;
  p.pieces = int(o.ctas) * instance->resident / s.kv_heads;
  if (p.pieces < 1) return GM_E_ARG;
  p.by_page = 0xffffffffu / unsigned(s.page), p.by_group = (65536 + s.group - 1) / s.group;
  p.score_scale = s.scale * 1.4426950408889634f;
  p.scale_log2 = s.codes || s.softcap > 0.f ? 1.f : p.score_scale;
  gm::set_scales(call, s, &p);
  // A piece has at least a step of keys for each of four warps.
  const int step = instance->step;
  p.sequence_cost = s.seqs > 1 ? gm::kSequenceCost : 0;
  const int64_t each = (call.max_ctx + 2 * step - 1) / step + p.sequence_cost;
  const int64_t max_pieces = (int64_t(s.seqs) * each + 3) / 4;
  const gm::Launch shape{.grid_x = unsigned((max_pieces < p.pieces ? max_pieces : p.pieces) * s.kv_heads),
                         .block = 128,
                         .smem = instance->smem,
                         .pdl = true};
  if (s.softcap > 0.f) {
    const gm::SoftCap<true> cap = gm::soft_cap(s.softcap, s.codes ? 0.f : s.scale);
    return gm_paged_decode_softcap_sm90(&p, &cap, instance->dtype, s.head_dim, instance->rows, &shape, device,
                                        stream);
  }
  void* args[] = {&p};
  return instance->kernel.launch(device, stream, shape, args);
}

#endif
