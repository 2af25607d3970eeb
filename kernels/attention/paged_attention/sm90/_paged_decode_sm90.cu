// Paged attention for few rows of each sequence on Hopper:
// the kernels by dtype and head size, and their entry point.
#include "_paged_decode_instances_sm90.cuh"
#include "attention/sm90/_attention_host_sm90.h"

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

// strides as those of gm_paged_attention_sm90, then of k_scale and v_scale by block, slot and head, 0 where
// that has no scale of its own. k_scale and v_scale null: caches of q's dtype; else of e4m3 codes, by_token
// with a scale per token and head. No sequence has more than max_q new tokens and max_ctx keys;
// max_q times the query heads of a KV head is at most 16 (8 for codes and heads over 128), and KV heads are at
// most the processors. dtype: of q
// and out, 1 is fp16, 2 bf16. lse and sinks may be null. counters: 2 processors integers that are zero, and
// are zero again after the launch. parts: 4 processors (head_dim + 2) 64 bytes. scale > 0. softcap >= 0, 0:
// none. device < 0 asks for the bytes of shared memory.
GM_CUDA_ENTRY(gm_paged_decode_sm90)
(void* out, void* lse, const void* q, const void* k, const void* v, const void* table,
 const void* query_start, const void* seq_lens, const void* sinks, const void* k_scale, const void* v_scale,
 void* counters, void* parts, const int64_t* strides, int tokens, int seqs, int heads, int kv_heads,
 int head_dim, int page, int dtype, int by_token, int max_q, int max_ctx, int window, float scale,
 float softcap, int processors, int device, void* stream) {
  if (dtype != 1 && dtype != 2) return GM_E_DTYPE;
  if (tokens < 0 || seqs < 1 || kv_heads < 1 || heads < 1 || heads % kv_heads != 0 || page < 1 || max_q < 1)
    return GM_E_SHAPE;
  const int group = heads / kv_heads;
  const int64_t rows = int64_t(max_q) * group;
  if (rows > 16 || !(scale > 0.f) || !(softcap >= 0.f) || processors < 1 || max_ctx < 1) return GM_E_ARG;
  const bool codes = k_scale != nullptr;
  if (codes != (v_scale != nullptr)) return GM_E_ARG;
  const int bytes = codes ? 1 : 2;
  Instance* instance = nullptr;
  for (Instance& i : g_instances)
    if (i.dtype == (codes ? 0 : dtype) && i.head_dim == head_dim && i.rows == (rows > 8 ? 16 : 8))
      instance = &i;
  if (instance == nullptr) return GM_E_SHAPE;
  if (device < 0) return int(instance->smem);
  if (tokens == 0) return GM_OK;
  if (!gm::rows_aligned(q, strides, 2, 2) || !gm::rows_aligned(out, strides + 2, 2, 2) ||
      !gm::rows_aligned(k, strides + 4, 3, bytes) || !gm::rows_aligned(v, strides + 7, 3, bytes) ||
      strides[5] >= 1 << 30 || strides[8] >= 1 << 30)
    return GM_E_SHAPE;

  gm::DecodeParams p{};
  p.out = out, p.lse = static_cast<float*>(lse), p.sinks = static_cast<const float*>(sinks);
  p.table = static_cast<const int*>(table), p.query_start = static_cast<const int*>(query_start);
  p.seq_lens = static_cast<const int*>(seq_lens), p.counters = static_cast<unsigned*>(counters);
  p.parts = static_cast<float*>(parts), p.q = q, p.k = k, p.v = v;
  p.q_token = strides[0] * 2, p.q_head = strides[1] * 2, p.out_token = strides[2], p.out_head = strides[3];
  p.k_block = strides[4] * bytes, p.k_slot = int(strides[5] * bytes), p.k_head = strides[6] * bytes;
  p.v_block = strides[7] * bytes, p.v_slot = int(strides[8] * bytes), p.v_head = strides[9] * bytes,
  p.table_row = strides[10];
  p.seqs = seqs, p.heads = heads, p.kv_heads = kv_heads, p.head_dim = head_dim, p.group = group,
  p.window = window, p.page = page;
  p.pieces = processors * instance->resident / kv_heads;
  if (p.pieces < 1) return GM_E_ARG;
  p.by_page = 0xffffffffu / unsigned(page), p.by_group = (65536 + group - 1) / group;
  p.score_scale = scale * 1.4426950408889634f, p.scale_log2 = codes || softcap > 0.f ? 1.f : p.score_scale;
  p.k_scale = static_cast<const float*>(k_scale), p.v_scale = static_cast<const float*>(v_scale);
  p.k_scale_block = strides[11], p.k_scale_slot = strides[12], p.k_scale_head = strides[13];
  p.v_scale_block = strides[14], p.v_scale_slot = strides[15], p.v_scale_head = strides[16];
  p.by_token = by_token != 0, p.bf16 = dtype == 2;
  // A piece has at least a step of keys for each of four warps.
  const int step = instance->step;
  p.beginning = seqs > 1 ? gm::kBeginning : 0;
  const int64_t each = (int64_t(max_ctx) + 2 * step - 1) / step + p.beginning;
  const int64_t most = (int64_t(seqs) * each + 3) / 4;
  const gm::Launch shape{.grid_x = unsigned((most < p.pieces ? most : p.pieces) * kv_heads),
                         .block = 128,
                         .smem = instance->smem,
                         .pdl = true};
  if (softcap > 0.f) {
    const gm::SoftCap<true> cap = gm::soft_cap(softcap, codes ? 0.f : scale);
    return gm_paged_decode_softcap_sm90(&p, &cap, instance->dtype, head_dim, instance->rows, &shape, device,
                                        stream);
  }
  void* args[] = {&p};
  return instance->kernel.launch(device, stream, shape, args);
}

#endif
