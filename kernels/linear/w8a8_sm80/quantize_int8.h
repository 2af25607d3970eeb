// Rows of fp16 or bf16 to int8 with a scale each, in one launch (sm90/quantize_rows.cuh). A source defines GM_ENTRY, and
// includes this.
#pragma once
#include <cstdint>

#include "gm_cuda.h"
#include "sm90/quantize_rows.cuh"

struct QuantizeInt8Params {
  const uint16_t* x;
  uint8_t* codes;  // [m, k]
  float* scales;   // [m]
  int64_t ldx;
  int k;
};

#ifdef __CUDACC__

// One CTA per row.
template <bool HALF>
__device__ __forceinline__ void quantize_row_to_int8(const QuantizeInt8Params& p) {
  using namespace gm::quantize;
  const int row = blockIdx.x, vectors = p.k / kVector;
  const uint4* x = reinterpret_cast<const uint4*>(p.x + row * p.ldx);
  const auto load = [&](int at) { return x[at]; };
  uint4 kept[kKept];
  load_row(kept, vectors, load);
  const float scale = row_scale<HALF, true>(kept, vectors, load);
  int sum = 0;
  write_codes<HALF, true>(reinterpret_cast<uint2*>(p.codes + static_cast<int64_t>(row) * p.k), kept, vectors,
                          load, scale, sum);
  if (threadIdx.x == 0) p.scales[row] = scale;
}

#define GM_QUANTIZE(type, half)                                            \
  extern "C" __global__ void __launch_bounds__(gm::quantize::kThreads)     \
      quantize_int8_##type(const __grid_constant__ QuantizeInt8Params p) { \
    quantize_row_to_int8<half>(p);                                         \
  }
GM_QUANTIZE(fp16, true)
GM_QUANTIZE(bf16, false)

#else
#include "args.h"

namespace {
gm::CudaKernel g_kernels[2] = {{GM_CUBIN, "quantize_int8_fp16"}, {GM_CUBIN, "quantize_int8_bf16"}};
}

GM_CUDA_ARGS(GM_ENTRY, GmQuantizeInt8Sm80Args)(const GmQuantizeInt8Sm80Args* args) {
  const GmQuantizeInt8Sm80Args& a = *args;
  if (a.x_type != 1 && a.x_type != 2) return GM_E_DTYPE;
  if (a.m < 0 || a.k < 1 || a.k % 16 || a.ldx % 8 || !gm::is_aligned(a.x)) return GM_E_SHAPE;
  if (a.m == 0) return GM_OK;
  QuantizeInt8Params p{static_cast<const uint16_t*>(a.x), static_cast<uint8_t*>(a.codes), a.scales, a.ldx,
                       a.k};
  void* arguments[] = {&p};
  return g_kernels[a.x_type - 1].launch(a.device, a.stream, {.grid_x = unsigned(a.m), .block = 256},
                                        arguments);
}

#endif
