// Paged attention for Hopper with heads of more than 128 elements: the kernels by dtype and soft cap, and
// their entry point.
#include "_paged_attention_sm90.cuh"
#include "_paged_host_sm90.h"

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
// page of a multiple of 8 tokens. At parts_at: (units + 4 ctas) 33 512 bytes. part_tiles: tiles of 64 keys.
GM_CUDA_CALL(gm_paged_wide_sm90, PagedAttention, ctas, part_tiles, reading, units, counters_at, parts_at)
(const GmPagedAttentionCall& call, const gm_paged_wide_sm90_options& o, int device, void* stream) {
  using Shape = gm::AttentionShape<256>;
  gm::PagedSizes s;
  if (const int refused = gm::paged_sizes(call, &s)) return refused;
  if (s.codes || !gm::takes_options(s, o)) return GM_E_ARG;
  if (s.page % 8 != 0 || s.head_dim <= 128 || s.head_dim > 256 || s.head_dim % 8 != 0) return GM_E_SHAPE;
  Instance* instance = nullptr;
  for (Instance& i : g_instances)
    if (i.dtype == s.dtype) instance = &i;
  if (instance == nullptr) return GM_E_DTYPE;
  if (device < 0) return Shape::kBytes;
  if (s.tokens == 0) return GM_OK;
  if (!gm::paged_rows_copyable(call, 2)) return GM_E_SHAPE;

  const int box = (s.page & -s.page) < Shape::kKeys ? s.page & -s.page : Shape::kKeys;
  gm::AttentionParams p = gm::attention_params<gm::AttentionParams>(call, s, o, Shape::kRows);
  p.scale_log2 = s.softcap > 0.f ? 1.f : p.score_scale;
  p.box = box, p.log_boxes = __builtin_ctz(unsigned(Shape::kKeys / box));

  CUtensorMap maps[3] = {};
  const cuuint64_t q_sizes[] = {cuuint64_t(s.head_dim), cuuint64_t(s.heads), cuuint64_t(s.tokens)};
  const int64_t q_strides[] = {call.q_stride[1], call.q_stride[0]};
  const cuuint32_t q_box[] = {64, cuuint32_t(s.group), cuuint32_t(p.tile_q)};
  const cuuint64_t sizes[] = {cuuint64_t(s.head_dim), cuuint64_t(s.page), cuuint64_t(s.kv_heads),
                              cuuint64_t(s.blocks > 0 ? s.blocks : 1)};
  const cuuint32_t kv_box[] = {64, cuuint32_t(box), 1, 1};
  const int64_t k_strides[] = {call.k_cache_stride[1], call.k_cache_stride[2], call.k_cache_stride[0]},
                v_strides[] = {call.v_cache_stride[1], call.v_cache_stride[2], call.v_cache_stride[0]};
  int status = gm::heads_map(&maps[0], call.q, s.dtype == 2, 3, q_sizes, q_strides, q_box);
  if (status == GM_OK)
    status = gm::heads_map(&maps[1], call.k_cache, s.dtype == 2, 4, sizes, k_strides, kv_box);
  if (status == GM_OK)
    status = gm::heads_map(&maps[2], call.v_cache, s.dtype == 2, 4, sizes, v_strides, kv_box);
  if (status != GM_OK) return status;
  // An upper bound of the work tiles of a batch of as many tokens.
  const int64_t most =
      (int64_t(s.tokens) / p.tile_q + int64_t(s.seqs) * (o.units > 0 ? gm::kMostParts : 1)) * s.kv_heads;
  gm::SoftCap<true> cap = gm::soft_cap(s.softcap, s.scale);
  void* args[] = {&p, &maps[0], &maps[1], &maps[2], &cap};  // the last one is of capped kernels
  gm::CudaKernel& kernel = s.softcap > 0.f ? instance->capped : instance->plain;
  return kernel.launch(device, stream,
                       {.grid_x = unsigned(most < o.ctas ? most : o.ctas),
                        .block = Shape::kThreads,
                        .smem = unsigned(Shape::kBytes),
                        .pdl = true},
                       args);
}

#endif
