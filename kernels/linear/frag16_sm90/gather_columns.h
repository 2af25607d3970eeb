// Columns of x in the order of a weight whose columns were sorted (act-order): out[m, i] = x[m, perm[i]], 0
// where perm is -1. A source defines GM_ENTRY, and GM_OVERLAP if a launch may begin before the one before it ends (sm_90 and
// newer), and includes this.
#pragma once
#include <cstdint>

#include "gm_cuda.h"

struct GatherParams {
  const uint16_t* x;
  uint16_t* out;
  const int32_t* perm;
  int64_t ldx;
  int columns;
};

#ifdef __CUDACC__
#include "sm90/ptx.cuh"

extern "C" __global__ void __launch_bounds__(256) gather_columns(const __grid_constant__ GatherParams p) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  const int from = i < p.columns ? p.perm[i] : -1;  // part of the weight, so it may be read before the wait
#ifdef GM_OVERLAP
  gm::griddepcontrol_launch_dependents();
  gm::griddepcontrol_wait();
#endif
  if (i < p.columns)
    p.out[static_cast<int64_t>(blockIdx.y) * p.columns + i] = from < 0 ? 0 : p.x[blockIdx.y * p.ldx + from];
}

#else
#include "args.h"

namespace {
#ifdef GM_OVERLAP
constexpr bool kOverlap = true;
#else
constexpr bool kOverlap = false;
#endif
gm::CudaKernel g_gather{GM_CUBIN, "gather_columns"};
}  // namespace

GM_CUDA_ARGS(GM_ENTRY, GmGatherColumnsArgs)(const GmGatherColumnsArgs* args) {
  const GmGatherColumnsArgs& a = *args;
  if (a.m < 0 || a.m > 65535 || a.columns < 0) return GM_E_SHAPE;
  if (a.m == 0 || a.columns == 0) return GM_OK;
  GatherParams p{static_cast<const uint16_t*>(a.x), static_cast<uint16_t*>(a.out), a.perm, a.ldx, a.columns};
  void* arguments[] = {&p};
  return g_gather.launch(
      a.device, a.stream,
      {.grid_x = unsigned((a.columns + 255) / 256), .grid_y = unsigned(a.m), .block = 256, .pdl = kOverlap},
      arguments);
}

#endif
