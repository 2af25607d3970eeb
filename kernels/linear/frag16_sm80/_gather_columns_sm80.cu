// Columns of x in the order of a weight whose columns were sorted (act-order): out[m, i] = x[m, perm[i]], 0
// where perm is -1.
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

extern "C" __global__ void __launch_bounds__(256) gather_columns(const __grid_constant__ GatherParams p) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= p.columns) return;
  const int from = p.perm[i];
  p.out[static_cast<int64_t>(blockIdx.y) * p.columns + i] = from < 0 ? 0 : p.x[blockIdx.y * p.ldx + from];
}

#else
#include "linear/frag16_sm90/args.h"

namespace {
gm::CudaKernel g_gather{GM_CUBIN, "gather_columns"};
}

GM_CUDA_ARGS(gm_gather_columns_sm80, GmGatherColumnsArgs)(const GmGatherColumnsArgs* args) {
  const GmGatherColumnsArgs& a = *args;
  if (a.m < 0 || a.m > 65535 || a.columns < 0) return GM_E_SHAPE;
  if (a.m == 0 || a.columns == 0) return GM_OK;
  GatherParams p{static_cast<const uint16_t*>(a.x), static_cast<uint16_t*>(a.out), a.perm, a.ldx, a.columns};
  void* arguments[] = {&p};
  return g_gather.launch(a.device, a.stream,
                         {.grid_x = unsigned((a.columns + 255) / 256), .grid_y = unsigned(a.m), .block = 256},
                         arguments);
}

#endif
