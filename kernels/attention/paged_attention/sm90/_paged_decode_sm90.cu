// Paged attention for few rows of each sequence on Hopper:
// the kernels by dtype and head size, and their entry point.
#include "_paged_decode_host_sm90.h"
#include "_paged_decode_instances_sm90.cuh"

#ifdef __CUDACC__

#define GM_ONE(type, code, C, d, n, suffix)                                                 \
  extern "C" __global__ void __launch_bounds__(gm::DecodeShape<d, n, C::kBytes>::kThreads,  \
                                               gm::DecodeShape<d, n, C::kBytes>::kResident) \
      paged_decode_##type##_d##d##suffix(const __grid_constant__ gm::DecodeParams p) {      \
    gm::paged_decode<C, d, n, false>(p, {});                                                \
  }
GM_EACH(GM_ONE)

#define GM_WIDE(type, code, C, d, n, suffix)                                                     \
  extern "C" __global__ void __launch_bounds__(gm::DecodeShape<d, n, C::kBytes, 8>::kThreads, 1) \
      paged_decode_##type##_d##d##suffix(const __grid_constant__ gm::DecodeParams p) {           \
    gm::paged_decode<C, d, n, false, 8>(p, {});                                                  \
  }
GM_EACH_WIDE(GM_WIDE)

#else

namespace {

struct Instance {
  int dtype, head_dim, rows;  // dtype: of q, out and the caches; 0 where the caches hold codes
  int warps, resident, step;
  unsigned smem;
  gm::CudaKernel kernel;
};
template <typename S>
constexpr Instance instance_of(int dtype, int head_dim, int rows, gm::CudaKernel kernel) {
  return {dtype, head_dim, rows, S::kWarps, S::kResident, S::kStep, S::kBytes, kernel};
}

#define GM_ONE(type, code, C, d, n, suffix)                         \
  instance_of<gm::DecodeShape<d, n, code == 0 ? 1 : 2>>(code, d, n, \
                                                        {GM_CUBIN, "paged_decode_" #type "_d" #d #suffix}),
Instance g_instances[] = {GM_EACH(GM_ONE)};

#define GM_WIDE(type, code, C, d, n, suffix) \
  instance_of<gm::DecodeShape<d, n, 2, 8>>(code, d, n, {GM_CUBIN, "paged_decode_" #type "_d" #d #suffix}),
Instance g_wide[] = {GM_EACH_WIDE(GM_WIDE)};

}  // namespace

// A call of few rows of each sequence: max_q times the query heads of a KV head is at most 16 (8 for codes and
// heads over 128), and KV heads are at most the multiprocessors, which ctas is. No sequence has more than max_q
// new tokens and max_ctx keys. scale > 0. cta_warps: 4 or 8; 0 for 8 where contexts and KV heads are about as many pairs as
// multiprocessors or where there is one context, 4 otherwise. What has no kernel of 8 (spec.py, has_wide) runs in 4. workspace: at
// counters_at 2 ctas integers that are zero, and are zero again after the launch; at parts_at 4 ctas (head_dim + 2) 64
// bytes. device < 0 asks for the bytes of shared memory.
GM_CUDA_CALL(gm_paged_decode_sm90, PagedAttention, ctas, cta_warps, counters_at, parts_at)
(const GmPagedAttentionCall& call, const gm_paged_decode_sm90_options& o, int device, void* stream) {
  gm::PagedSizes s;
  if (const int refused = gm::decode_sizes(call, o.ctas, &s)) return refused;
  if (o.cta_warps != 0 && o.cta_warps != 4 && o.cta_warps != 8) return GM_E_ARG;
  const int64_t pairs = int64_t(s.seqs) * s.kv_heads;
  const bool one_each = pairs <= o.ctas && pairs * 16 >= o.ctas * 15;
  const bool wide = o.cta_warps == 0 ? one_each || s.seqs == 1 : o.cta_warps == 8;
  Instance* instance = wide && s.softcap == 0.f ? gm::decode_instance(g_wide, call, s) : nullptr;
  if (instance == nullptr) instance = gm::decode_instance(g_instances, call, s);
  if (instance == nullptr) return GM_E_SHAPE;
  if (device < 0) return int(instance->smem);
  if (s.tokens == 0) return GM_OK;
  gm::DecodeParams p{};
  if (!gm::fill_params(call, s, o.counters_at, o.parts_at, &p)) return GM_E_SHAPE;
  p.pieces = int(o.ctas) * instance->resident / s.kv_heads;
  if (p.pieces < 1) return GM_E_ARG;
  // A piece has at least a step of keys for each warp.
  const int step = instance->step, warps = instance->warps;
  p.sequence_cost = s.seqs > 1 ? gm::kSequenceCost : 0;
  p.even = gm::even_pieces(s.seqs, p.pieces);
  const int64_t each = (call.max_ctx + 2 * step - 1) / step + p.sequence_cost;
  const int64_t max_pieces = (int64_t(s.seqs) * each + warps - 1) / warps;
  const gm::Launch shape{.grid_x = unsigned((max_pieces < p.pieces ? max_pieces : p.pieces) * s.kv_heads),
                         .block = unsigned(warps * 32),
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
