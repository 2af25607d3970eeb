// Attention over dense sequences for Hopper: the kernels by dtype and head size, and their entry point.
#include "_varlen_attention_sm90.cuh"
#include "attention/sm90/_attention_host_sm90.h"

#define GM_EACH(K)                    \
  K(bf16, 2, __nv_bfloat16, 192, 128) \
  K(fp16, 1, __half, 192, 128)        \
  K(bf16, 2, __nv_bfloat16, 128, 128) \
  K(fp16, 1, __half, 128, 128)

#ifdef __CUDACC__

#define GM_ONE(type, code, T, dk, dv)                                                        \
  extern "C" __global__ void __launch_bounds__(gm::VarlenShape<dk, dv>::kThreads, 1)         \
      varlen_attention_##type##_d##dk##_d##dv(                                               \
          const __grid_constant__ gm::VarlenParams p, const __grid_constant__ CUtensorMap q, \
          const __grid_constant__ CUtensorMap k, const __grid_constant__ CUtensorMap v) {    \
    gm::varlen_attention<T, dk, dv>(p, q, k, v);                                             \
  }
GM_EACH(GM_ONE)

#else

namespace {

struct Instance {
  int dtype, qk_dim, v_dim;  // dims: at most
  unsigned smem;
  gm::CudaKernel kernel;
};

#define GM_ONE(type, code, T, dk, dv) \
  {code, dk, dv, gm::VarlenShape<dk, dv>::kBytes, {GM_CUBIN, "varlen_attention_" #type "_d" #dk "_d" #dv}},
Instance g_instances[] = {GM_EACH(GM_ONE)};

// q, k or v [rows, heads, dim] in tiles of 128 rows and 64 elements. strides, in elements: row, head.
int tile_map(CUtensorMap* map, const void* base, bool bf16, int dim, int heads, int rows,
             const int64_t* strides) {
  const cuuint64_t sizes[] = {cuuint64_t(dim), cuuint64_t(heads), cuuint64_t(rows)};
  const int64_t outer[] = {strides[1], strides[0]};
  const cuuint32_t box[] = {64, 1, 128};
  return gm::heads_map(map, base, bf16, 3, sizes, outer, box);
}

}  // namespace

// strides, in elements: token and head of q, out, k and v. q [tokens, heads, qk_dim], k [rows, kv_heads,
// qk_dim], v [rows, kv_heads, v_dim], out [tokens, heads, v_dim]; query_start and context_start [seqs + 1].
// Dimensions of heads are multiples of 8, qk_dim up to 192 and v_dim up to 128; all rows begin at multiples
// of 16 bytes (GM_E_SHAPE otherwise). dtype: 1 is fp16, 2 bf16. lse may be null. scale > 0. device < 0 asks
// for the bytes of shared memory.
GM_CUDA_ENTRY(gm_varlen_attention_sm90)
(void* out, void* lse, const void* q, const void* k, const void* v, const void* query_start,
 const void* context_start, const int64_t* strides, int tokens, int rows, int seqs, int heads, int kv_heads,
 int qk_dim, int v_dim, int dtype, float scale, int ctas, int device, void* stream) {
  if (dtype != 1 && dtype != 2) return GM_E_DTYPE;
  if (tokens < 0 || rows < 0 || seqs < 1 || kv_heads < 1 || heads < 1 || heads % kv_heads != 0 ||
      qk_dim < 8 || v_dim < 8 || qk_dim % 8 != 0 || v_dim % 8 != 0)
    return GM_E_SHAPE;
  if (!(scale > 0.f) || ctas < 1) return GM_E_ARG;
  Instance* instance = nullptr;
  for (Instance& i : g_instances)
    if (i.dtype == dtype && qk_dim <= i.qk_dim && v_dim <= i.v_dim &&
        (instance == nullptr || i.qk_dim < instance->qk_dim))
      instance = &i;
  if (instance == nullptr) return GM_E_SHAPE;
  if (device < 0) return int(instance->smem);
  if (tokens == 0) return GM_OK;
  const void* const bases[] = {q, out, k, v};
  for (int i = 0; i < 4; ++i)
    if (reinterpret_cast<uintptr_t>(bases[i]) % 16 != 0 || strides[2 * i] % 8 != 0 ||
        strides[2 * i + 1] % 8 != 0 || strides[2 * i] < 0 || strides[2 * i + 1] < 0)
      return GM_E_SHAPE;

  gm::VarlenParams p{};
  p.out = out, p.lse = static_cast<float*>(lse);
  p.query_start = static_cast<const int*>(query_start);
  p.context_start = static_cast<const int*>(context_start);
  p.out_token = strides[2], p.out_head = strides[3];
  p.seqs = seqs, p.heads = heads, p.group = heads / kv_heads, p.v_dim = v_dim;
  p.scale_log2 = scale * 1.4426950408889634f;
  CUtensorMap maps[3] = {};
  const bool bf16 = dtype == 2;
  int status = tile_map(&maps[0], q, bf16, qk_dim, heads, tokens, strides);
  // Without keys nothing is copied, but a map has at least one row.
  if (status == GM_OK)
    status = tile_map(&maps[1], rows > 0 ? k : q, bf16, qk_dim, rows > 0 ? kv_heads : 1, rows > 0 ? rows : 1,
                      strides + 4);
  if (status == GM_OK)
    status = tile_map(&maps[2], rows > 0 ? v : q, bf16, v_dim, rows > 0 ? kv_heads : 1, rows > 0 ? rows : 1,
                      strides + 6);
  if (status != GM_OK) return status;
  const int64_t most = (int64_t(tokens) / 128 + seqs) * heads;  // tiles of as many tokens
  void* args[] = {&p, &maps[0], &maps[1], &maps[2]};
  return instance->kernel.launch(device, stream,
                                 {.grid_x = unsigned(most < ctas ? most : ctas),
                                  .block = gm::VarlenShape<192, 128>::kThreads,
                                  .smem = instance->smem,
                                  .pdl = true},
                                 args);
}

#endif
