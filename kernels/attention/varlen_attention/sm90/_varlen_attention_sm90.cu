// Attention over dense sequences for Hopper: the kernels by dtype and head size, and their entry point.
#include "_varlen_attention_sm90.cuh"
#include "attention/sm90/_attention_host_sm90.h"
#include "calls/varlen_attention.h"

// Type, its code, elements of a key and of a value. A query sees the keys up to its own, or those in a window.
#define GM_EACH(K)                                             \
  K(varlen_attention, bf16, 2, __nv_bfloat16, 192, 128, false) \
  K(varlen_attention, fp16, 1, __half, 192, 128, false)        \
  K(varlen_attention, bf16, 2, __nv_bfloat16, 128, 128, false) \
  K(varlen_attention, fp16, 1, __half, 128, 128, false)        \
  K(varlen_window, bf16, 2, __nv_bfloat16, 192, 128, true)     \
  K(varlen_window, fp16, 1, __half, 192, 128, true)            \
  K(varlen_window, bf16, 2, __nv_bfloat16, 128, 128, true)     \
  K(varlen_window, fp16, 1, __half, 128, 128, true)            \
  K(varlen_window, bf16, 2, __nv_bfloat16, 64, 64, true)       \
  K(varlen_window, fp16, 1, __half, 64, 64, true)

#ifdef __CUDACC__

#define GM_ONE(kind, type, code, T, dk, dv, window)                                          \
  extern "C" __global__ void __launch_bounds__(gm::VarlenShape<dk, dv>::kThreads, 1)         \
      kind##_##type##_d##dk##_d##dv(                                                         \
          const __grid_constant__ gm::VarlenParams p, const __grid_constant__ CUtensorMap q, \
          const __grid_constant__ CUtensorMap k, const __grid_constant__ CUtensorMap v) {    \
    gm::varlen_attention<T, dk, dv, window>(p, q, k, v);                                     \
  }
GM_EACH(GM_ONE)

#else

namespace {

struct Instance {
  bool window;
  int dtype, qk_dim, v_dim;  // dims: at most
  unsigned smem;
  gm::CudaKernel kernel;
};

#define GM_ONE(kind, type, code, T, dk, dv, window) \
  {window, code, dk, dv, gm::VarlenShape<dk, dv>::kBytes, {GM_CUBIN, #kind "_" #type "_d" #dk "_d" #dv}},
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

// Dimensions of heads are multiples of 8, qk_dim up to 192 and v_dim up to 128; all rows begin at multiples
// of 16 bytes (GM_E_SHAPE otherwise). scale > 0. device < 0 asks for the bytes of shared memory.
GM_CUDA_CALL(gm_varlen_attention_sm90, VarlenAttention, ctas)
(const GmVarlenAttentionCall& call, const gm_varlen_attention_sm90_options& o, int device, void* stream) {
  if (call.x_type != 1 && call.x_type != 2) return GM_E_DTYPE;
  const int64_t sizes[] = {call.q_tokens, call.total_ctx, call.seqs, call.heads, call.kv_heads};
  for (int64_t size : sizes)
    if (size < 0 || size > INT32_MAX) return GM_E_SHAPE;
  if (call.seqs < 1 || call.kv_heads < 1 || call.heads < 1 || call.heads % call.kv_heads != 0 ||
      call.qk_dim < 8 || call.v_dim < 8 || call.qk_dim % 8 != 0 || call.v_dim % 8 != 0)
    return GM_E_SHAPE;
  const int tokens = int(call.q_tokens), rows = int(call.total_ctx), seqs = int(call.seqs);
  const int heads = int(call.heads), kv_heads = int(call.kv_heads);
  const float scale = float(call.scale);
  if (!(scale > 0.f) || o.ctas < 1 || o.ctas > INT32_MAX) return GM_E_ARG;
  // A window that reaches past every context is none.
  const int64_t reach = call.q_tokens + call.total_ctx;
  const int64_t left = call.window_left < reach ? call.window_left : -1;
  const int64_t right = call.window_right < reach ? call.window_right : -1;
  if (left < -1 || right < -1) return GM_E_ARG;
  const bool window = left >= 0 || right != 0;
  if (window && reach > INT32_MAX / 4) return GM_E_SHAPE;  // sums of positions and windows are int
  Instance* instance = nullptr;
  for (Instance& i : g_instances)
    if (i.window == window && i.dtype == call.x_type && call.qk_dim <= i.qk_dim && call.v_dim <= i.v_dim &&
        (instance == nullptr || i.qk_dim < instance->qk_dim))
      instance = &i;
  if (instance == nullptr) return GM_E_SHAPE;
  const int qk_dim = int(call.qk_dim), v_dim = int(call.v_dim);
  if (device < 0) return int(instance->smem);
  if (tokens == 0) return GM_OK;
  if (!gm::rows_copyable(call.q, call.q_stride, 2, 2) ||
      !gm::rows_copyable(call.out, call.out_stride, 2, 2) ||
      !gm::rows_copyable(call.k, call.k_stride, 2, 2) || !gm::rows_copyable(call.v, call.v_stride, 2, 2))
    return GM_E_SHAPE;

  gm::VarlenParams p{};
  p.out = call.out, p.lse = static_cast<float*>(call.lse);
  p.query_start = static_cast<const int*>(call.query_start);
  p.context_start = static_cast<const int*>(call.context_start);
  p.out_token = call.out_stride[0], p.out_head = call.out_stride[1];
  p.seqs = seqs, p.heads = heads, p.group = heads / kv_heads, p.v_dim = v_dim;
  p.left = int(left), p.right = int(right);
  p.scale_log2 = scale * 1.4426950408889634f;
  CUtensorMap maps[3] = {};
  const bool bf16 = call.x_type == 2;
  int status = tile_map(&maps[0], call.q, bf16, qk_dim, heads, tokens, call.q_stride);
  // Without keys nothing is copied, but a tensor map has at least one row.
  if (status == GM_OK)
    status = tile_map(&maps[1], rows > 0 ? call.k : call.q, bf16, qk_dim, rows > 0 ? kv_heads : 1,
                      rows > 0 ? rows : 1, call.k_stride);
  if (status == GM_OK)
    status = tile_map(&maps[2], rows > 0 ? call.v : call.q, bf16, v_dim, rows > 0 ? kv_heads : 1,
                      rows > 0 ? rows : 1, call.v_stride);
  if (status != GM_OK) return status;
  const int64_t max_tiles = (int64_t(tokens) / 128 + seqs) * heads;  // tiles of as many tokens
  void* args[] = {&p, &maps[0], &maps[1], &maps[2]};
  return instance->kernel.launch(device, stream,
                                 {.grid_x = unsigned(max_tiles < o.ctas ? max_tiles : o.ctas),
                                  .block = gm::VarlenShape<192, 128>::kThreads,
                                  .smem = instance->smem,
                                  .pdl = true},
                                 args);
}

#endif
