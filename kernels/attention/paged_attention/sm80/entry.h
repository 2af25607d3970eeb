// The kernels of decode for some head sizes, and what their entry point does.
//
// A source _paged_decode_<which>_sm80.cu defines
//   GM_EACH(K)  K(type of q and out, its code, element type of the caches, elements of a head, rows of a tile, suffix) ...
// (names and codes: bf16, 2; fp16, 1; codes, 0, where q and out are either)
// and includes this file, whose `run` its entry calls: nvcc reads the kernels, the host compiler the entry.
#pragma once
#include "gm_cuda.h"
#include "attention/paged_attention/sm90/_paged_decode_host_sm90.h"
#include "shape.cuh"

#ifdef __CUDACC__

#define GM_ONE(type, code, C, d, n, suffix)                                                     \
  extern "C" __global__ void __launch_bounds__(gm::DecodeShape<d, n, C::kBytes>::kThreads,      \
                                               gm::DecodeShape<d, n, C::kBytes>::kResident)     \
      paged_decode_##type##_d##d##suffix(const __grid_constant__ gm::DecodeParams p) {          \
    gm::paged_decode<C, d, n, false>(p, {});                                                    \
  }                                                                                             \
  extern "C" __global__ void __launch_bounds__(gm::DecodeShape<d, n, C::kBytes>::kThreads,      \
                                               gm::DecodeShape<d, n, C::kBytes>::kResident)     \
      paged_decode_##type##_d##d##suffix##_cap(const __grid_constant__ gm::DecodeParams p,      \
                                               const __grid_constant__ gm::SoftCap<true> cap) { \
    gm::paged_decode<C, d, n, true>(p, cap);                                                    \
  }
GM_EACH(GM_ONE)

#else

namespace {

struct Instance {
  int dtype, head_dim, rows, step, threads;  // dtype: of q, out and the caches; 0 where the caches hold codes
  unsigned smem;
  gm::CudaKernel plain, capped;
};

template <typename S>
constexpr Instance instance_of(int dtype, int head_dim, int rows, gm::CudaKernel plain,
                               gm::CudaKernel capped) {
  return {dtype, head_dim, rows, S::kStep, S::kThreads, S::kBytes, plain, capped};
}

#define GM_ONE(type, code, C, d, n, suffix)                          \
  instance_of<gm::DecodeShape<d, n, code == 0 ? 1 : 2>>(             \
      code, d, n, {GM_CUBIN, "paged_decode_" #type "_d" #d #suffix}, \
      {GM_CUBIN, "paged_decode_" #type "_d" #d #suffix "_cap"}),
Instance g_instances[] = {GM_EACH(GM_ONE)};

// A call of few rows of each sequence: max_q times the query heads of a KV head is at most 16 (8 with heads over 128 and with codes), and KV
// heads are at most `ctas`. No sequence has more than max_q new tokens and max_ctx keys. scale > 0.
// workspace: `ctas` integers that are zero, and are zero again after the launch; at parts_at 2 ctas rows (head_dim + 2) floats.
// device < 0 asks for the bytes of shared memory.
int run(const GmPagedAttentionCall& call, int64_t ctas, int64_t parts_at, int device, void* stream) {
  gm::PagedSizes s;
  if (const int refused = gm::decode_sizes(call, ctas, &s)) return refused;
  if (ctas < s.kv_heads) return GM_E_ARG;
  Instance* instance = gm::decode_instance(g_instances, call, s);
  if (instance == nullptr) return GM_E_SHAPE;
  if (device < 0) return int(instance->smem);
  if (s.tokens == 0) return GM_OK;
  gm::DecodeParams p{};
  if (!gm::fill_params(call, s, 0, parts_at, &p)) return GM_E_SHAPE;
  p.pieces = int(ctas) / s.kv_heads, p.sequence_cost = s.seqs > 1 ? gm::kSequenceCost : 0;
  // A piece has at least a step of keys for each warp; a context begins and ends within steps.
  const int warps = instance->threads / 32, step = instance->step;
  const int64_t each = (call.max_ctx + 2 * step - 1) / step + p.sequence_cost;
  const int64_t most = (int64_t(s.seqs) * each + warps - 1) / warps;
  gm::SoftCap<true> cap = gm::soft_cap(s.softcap, s.codes ? 0.f : s.scale);
  void* args[] = {&p, &cap};  // the last one is of capped kernels
  gm::CudaKernel& kernel = s.softcap > 0.f ? instance->capped : instance->plain;
  return kernel.launch(device, stream,
                       {.grid_x = unsigned((most < p.pieces ? most : p.pieces) * s.kv_heads),
                        .block = unsigned(instance->threads),
                        .smem = instance->smem},
                       args);
}

}  // namespace

#endif
