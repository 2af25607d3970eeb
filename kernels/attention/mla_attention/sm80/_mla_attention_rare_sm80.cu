// Latent attention on sm_80 and newer: the kernels by dtype and rows of a tile, and their entry point.
#include "attention/sm90/_attention_host_sm90.h"
#include "calls/mla_attention.h"
#include "gm_cuda.h"
#include "merge.cuh"

#define GM_EACH(K)             \
  K(bf16, 2, __nv_bfloat16, 1) \
  K(bf16, 2, __nv_bfloat16, 2) \
  K(fp16, 1, __half, 1)        \
  K(fp16, 1, __half, 2)

#ifdef __CUDACC__

extern __shared__ __align__(128) uint8_t mla_smem[];

#define GM_ONE(type, code, T, tiles)                                                         \
  extern "C" __global__ void __launch_bounds__(gm::mla80::Shape<tiles>::kThreads, 3 - tiles) \
      mla_attention_##type##_x##tiles(const __grid_constant__ gm::mla80::Params p) {         \
    gm::mla80::attend<T, tiles>(p, mla_smem);                                                \
  }                                                                                          \
  extern "C" __global__ void __launch_bounds__(gm::mla80::kMergeWarps * 32)                  \
      mla_merge_##type##_x##tiles(const __grid_constant__ gm::mla80::Params p) {             \
    gm::mla80::merge<T, tiles>(p);                                                           \
  }
GM_EACH(GM_ONE)

#else

namespace {

struct Instance {
  int dtype, tiles, rows;
  unsigned smem;
  gm::CudaKernel attend, merge;
};

#define GM_ONE(type, code, T, tiles)               \
  {code,                                           \
   tiles,                                          \
   gm::mla80::Shape<tiles>::kRows,                 \
   unsigned(gm::mla80::Shape<tiles>::kBytes),      \
   {GM_CUBIN, "mla_attention_" #type "_x" #tiles}, \
   {GM_CUBIN, "mla_merge_" #type "_x" #tiles}},
Instance g_instances[] = {GM_EACH(GM_ONE)};

}  // namespace

// scale > 0. ctas: multiprocessors; resident: CTAs with tiles of 16 rows on one, 1 or 2; least: steps of 32 keys of a part of a context;
// whole: contexts are never divided, and there is no workspace. workspace: 32 ctas bytes of records, and behind them, at a multiple of 128
// bytes, 64 ctas rows of 514 floats. device < 0 asks for the bytes of shared memory.
// GM_E_SHAPE for strides that are none of 16-byte chunks.
GM_CUDA_CALL(gm_mla_attention_sm80, MlaAttention, ctas, resident, least, whole)
(const GmMlaAttentionCall& call, const gm_mla_attention_sm80_options& o, int device, void* stream) {
  namespace mla = gm::mla80;
  if (call.x_type != 1 && call.x_type != 2) return GM_E_DTYPE;
  const int64_t tokens = call.q_tokens, heads = call.heads;
  if (call.latent_dim != 512 || call.rope_dim != 64 || tokens < 0 || call.seqs < 1 ||
      call.seqs > INT32_MAX / 2 || heads < 1 || call.block_size < 1 || call.block_size > INT32_MAX ||
      call.max_q < 1 || call.max_ctx < 1 || call.max_ctx > INT32_MAX - 64 || tokens > INT32_MAX / heads)
    return GM_E_SHAPE;
  const float scale = float(call.scale);
  if (!(scale > 0.f) || o.ctas < 1 || o.ctas > 1 << 16 || o.resident < 1 || o.resident > 2 || o.least < 1 ||
      o.least > INT32_MAX)
    return GM_E_ARG;
  const int64_t longest = call.max_q < tokens ? call.max_q : tokens;
  const int tiles = longest * heads <= 16 ? 1 : 2;
  Instance* instance = nullptr;
  for (Instance& i : g_instances)
    if (i.dtype == call.x_type && i.tiles == tiles) instance = &i;
  if (device < 0) return int(instance->smem);
  if (tokens == 0) return GM_OK;
  if (!gm::rows_aligned(call.q, call.q_stride, 2, 2) || !gm::rows_aligned(call.out, call.out_stride, 2, 2) ||
      !gm::rows_aligned(call.cache, call.cache_stride, 2, 2))
    return GM_E_SHAPE;

  mla::Params p{};
  p.out = call.out, p.lse = static_cast<float*>(call.lse), p.q = call.q, p.cache = call.cache;
  p.table = static_cast<const int*>(call.block_table);
  p.query_start = static_cast<const int*>(call.query_start);
  p.seq_lens = static_cast<const int*>(call.seq_lens);
  p.q_token = call.q_stride[0], p.q_head = call.q_stride[1];
  p.cache_block = call.cache_stride[0], p.cache_slot = call.cache_stride[1];
  p.out_token = call.out_stride[0], p.out_head = call.out_stride[1], p.table_row = call.block_table_stride[0];
  p.seqs = int(call.seqs), p.tokens = int(tokens), p.heads = int(heads), p.page = int(call.block_size);
  p.least = int(o.least);
  p.by_page = 0xffffffffu / unsigned(p.page), p.by_heads = 0xffffffffu / unsigned(p.heads);
  p.scale_log2 = scale * 1.4426950408889634f;
  const int64_t ctas = o.ctas * (tiles == 1 ? o.resident : 1);
  const int64_t grid = mla::plan(&p, instance->rows, call.max_q, call.max_ctx, ctas, o.whole != 0);
  const int64_t steps = int64_t(p.seqs) * ((call.max_ctx + 31) / 32 + p.sequence_cost);
  if (grid > INT32_MAX || (p.pieces > 0 && steps > INT32_MAX / 2)) return GM_E_SHAPE;
  if (p.pieces > 0) {
    p.records = static_cast<mla::Record*>(call.workspace);
    p.parts = reinterpret_cast<float*>(static_cast<char*>(call.workspace) + (o.ctas * 32 + 127) / 128 * 128);
  }
  void* args[] = {&p};
  const int status = instance->attend.launch(
      device, stream,
      {.grid_x = unsigned(grid), .block = unsigned(mla::Shape<1>::kThreads), .smem = instance->smem}, args);
  if (status != GM_OK || p.pieces < 2) return status;
  const unsigned merging = unsigned(grid * (instance->rows / mla::kMergeWarps));
  return instance->merge.launch(device, stream, {.grid_x = merging, .block = mla::kMergeWarps * 32}, args);
}

#endif
