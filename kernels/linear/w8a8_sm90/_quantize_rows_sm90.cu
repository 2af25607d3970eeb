// Rows of fp16 or bf16 to e4m3 or int8, in one launch (sm90/quantize_rows.cuh).
#include <cstdint>

#include "gm_cuda.h"
#include "sm90/quantize_rows.cuh"

struct QuantizeParams {
  const uint16_t* x;
  uint8_t* codes;  // [m, k]
  float* scales;   // [m], or by groups [groups, pitch]
  int* sums;       // [m] of int8 codes
  int64_t ldx;
  int m, k, pitch;
};

#ifdef __CUDACC__

namespace {

using namespace gm::quantize;

// One CTA per row.
template <bool HALF, bool INT8>
__device__ __forceinline__ void quantize_row(const QuantizeParams& p) {
  __shared__ int totals[kThreads / 32];
  const int row = blockIdx.x, vectors = p.k / kVector, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const uint4* x = reinterpret_cast<const uint4*>(p.x + row * p.ldx);
  uint2* to = reinterpret_cast<uint2*>(p.codes + static_cast<int64_t>(row) * p.k);
  gm::griddepcontrol_launch_dependents();
  gm::griddepcontrol_wait();
  const auto load = [&](int at) { return x[at]; };
  uint4 kept[kKept];
  load_row(kept, vectors, load);
  const float scale = row_scale<HALF, INT8>(kept, vectors, load);
  int sum = 0;
  write_codes<HALF, INT8>(to, kept, vectors, load, scale, sum);
  if (threadIdx.x == 0) p.scales[row] = scale;
  if constexpr (INT8) {
    sum = __reduce_add_sync(0xffffffffu, sum);
    if (lane == 0) totals[warp] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int i = 1; i < kThreads / 32; ++i) sum += totals[i];
      p.sums[row] = sum;
    }
  }
}

// Sixteen lanes per group of 128 columns, `EACH` groups one after the other, whose loads are in flight together.
template <bool HALF, int EACH>
__device__ __forceinline__ void quantize_groups(const QuantizeParams& p) {
  constexpr unsigned kAtOnce = kThreads / 16;
  const unsigned groups = (p.k + 127) / 128, lane = threadIdx.x & 15;
  const unsigned first = blockIdx.x * kAtOnce * EACH + threadIdx.x / 16;
  gm::griddepcontrol_launch_dependents();
  int row[EACH], group[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const unsigned index = first + i * kAtOnce;
    row[i] = index / groups, group[i] = index - row[i] * groups;
  }
  const auto column = [&](int i) { return group[i] * 128 + static_cast<int>(lane) * kVector; };
  gm::griddepcontrol_wait();
  uint4 words[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i)
    words[i] = row[i] < p.m && column(i) < p.k
                   ? *reinterpret_cast<const uint4*>(p.x + row[i] * p.ldx + column(i))
                   : make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const float scale = group_scale<HALF>(words[i]);
    int sum = 0;
    if (row[i] < p.m && column(i) < p.k)
      *reinterpret_cast<uint2*>(p.codes + static_cast<int64_t>(row[i]) * p.k + column(i)) =
          codes_of<HALF, false>(words[i], scale, sum);
    if (row[i] < p.m && lane == 0) p.scales[static_cast<int64_t>(group[i]) * p.pitch + row[i]] = scale;
  }
}

}  // namespace

#define GM_QUANTIZE(type, half)                                                   \
  extern "C" __global__ void __launch_bounds__(kThreads)                          \
      quantize_rows_fp8_token_##type(const __grid_constant__ QuantizeParams p) {  \
    quantize_row<half, false>(p);                                                 \
  }                                                                               \
  extern "C" __global__ void __launch_bounds__(kThreads)                          \
      quantize_rows_int8_token_##type(const __grid_constant__ QuantizeParams p) { \
    quantize_row<half, true>(p);                                                  \
  }                                                                               \
  extern "C" __global__ void __launch_bounds__(kThreads)                          \
      quantize_rows_fp8_g128_##type(const __grid_constant__ QuantizeParams p) {   \
    quantize_groups<half, 1>(p);                                                  \
  }                                                                               \
  extern "C" __global__ void __launch_bounds__(kThreads)                          \
      quantize_rows_fp8_g128x4_##type(const __grid_constant__ QuantizeParams p) { \
    quantize_groups<half, 4>(p);                                                  \
  }
GM_QUANTIZE(fp16, true)
GM_QUANTIZE(bf16, false)

#else
#include "args.h"

namespace {
// The last ones: groups of 128, four for each sixteen lanes.
gm::CudaKernel g_kernels[4][2] = {
    {{GM_CUBIN, "quantize_rows_fp8_token_fp16"}, {GM_CUBIN, "quantize_rows_fp8_token_bf16"}},
    {{GM_CUBIN, "quantize_rows_fp8_g128_fp16"}, {GM_CUBIN, "quantize_rows_fp8_g128_bf16"}},
    {{GM_CUBIN, "quantize_rows_int8_token_fp16"}, {GM_CUBIN, "quantize_rows_int8_token_bf16"}},
    {{GM_CUBIN, "quantize_rows_fp8_g128x4_fp16"}, {GM_CUBIN, "quantize_rows_fp8_g128x4_bf16"}}};
// From so many on, each sixteen lanes have four: 512 CTAs rather than 2048.
constexpr int64_t kManyGroups = 32768;
}  // namespace

GM_CUDA_ARGS(gm_quantize_rows_sm90, GmQuantizeRowsArgs)(const GmQuantizeRowsArgs* args) {
  const GmQuantizeRowsArgs& a = *args;
  if (a.x_type != 1 && a.x_type != 2) return GM_E_DTYPE;
  if (a.format < 0 || a.format > 2) return GM_E_ARG;
  if (a.m < 0 || a.k < 1 || a.k % 16 || a.ldx % 8 || !gm::is_aligned(a.x)) return GM_E_SHAPE;
  if (a.format == 1 && a.pitch < a.m) return GM_E_SHAPE;
  if (a.m == 0) return GM_OK;
  QuantizeParams p{static_cast<const uint16_t*>(a.x),
                   static_cast<uint8_t*>(a.codes),
                   a.scales,
                   a.sums,
                   a.ldx,
                   a.m,
                   a.k,
                   a.pitch};
  const int64_t groups = int64_t(a.m) * ((a.k + 127) / 128);
  if (groups > INT32_MAX - 64) return GM_E_SHAPE;
  const bool each_four = a.format == 1 && groups >= kManyGroups;
  const int64_t at_once = each_four ? 64 : 16;  // groups of a CTA
  const int64_t ctas = a.format == 1 ? (groups + at_once - 1) / at_once : a.m;
  void* arguments[] = {&p};
  return g_kernels[each_four ? 3 : a.format][a.x_type - 1].launch(
      a.device, a.stream, {.grid_x = unsigned(ctas), .block = 256, .pdl = true}, arguments);
}

#endif
