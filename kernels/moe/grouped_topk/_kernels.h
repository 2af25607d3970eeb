// The kernels of grouped top-k, for floats of three kinds and lanes of five sizes, and their launch. A source includes this, and has an
// entry that calls `launch`; it defines GM_OVERLAP, and
// includes sm90/ptx.cuh, if its kernels start while the one before ends.
#pragma once
#include "gm_cuda.h"
#ifdef __CUDACC__
#include "_warp.cuh"
// In this order.
#include "_rows.cuh"

// A warp per row.
template <typename T, int kEach>
__device__ __forceinline__ void grouped_topk(const gm::topk::Params& p) {
  __shared__ gm::topk::Scratch<kEach> scratch[gm::topk::kWarps];
  const int64_t row = gm::first_row(blockDim.x / 32) + gm::warp();
  gm::topk::Row<T, kEach> one(p, scratch[gm::warp()], row);
#ifdef GM_OVERLAP
  gm::griddepcontrol_launch_dependents();
  gm::griddepcontrol_wait();
#endif
  if (row < p.rows) one.run(), one.write();
}

#define GM_ROWS(name, type, each)                                          \
  extern "C" __global__ void __launch_bounds__(32 * gm::topk::kWarps)      \
      choose_##name##_##each(const __grid_constant__ gm::topk::Params p) { \
    grouped_topk<type, each>(p);                                           \
  }
GM_TOPK_KERNELS(GM_ROWS)

#else
#include "_params.h"
#include "calls/grouped_topk.h"

namespace gm::topk {

#define GM_ROWS(name, type, each) {GM_CUBIN, "choose_" #name "_" #each},
static CudaKernel g_rows[] = {GM_TOPK_KERNELS(GM_ROWS)};

// warps: rows of a block.
inline int launch(const GmGroupedTopkCall& call, int64_t warps, bool overlap, int device, void* stream) {
  if (call.x_type < 0 || call.x_type > 2) return GM_E_DTYPE;
  if (warps < 1 || warps > kWarps) return GM_E_ARG;
  if (!is_choice(call)) return GM_E_SHAPE;
  const int64_t blocks = (call.m + warps - 1) / warps;
  if (call.m < 0 || blocks > INT32_MAX) return GM_E_SHAPE;
  if (call.m == 0) return GM_OK;
  Params p = params_of(call, call.x_type == 0 ? 4 : 2);
  void* args[] = {&p};
  return g_rows[call.x_type * std::size(kSizes) + size_of(call.e)].launch(
      device, stream, {.grid_x = unsigned(blocks), .block = unsigned(32 * warps), .pdl = overlap}, args);
}

}  // namespace gm::topk
#endif
