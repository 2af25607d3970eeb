// Rows of fp16 or bf16 to e4m3 (sm90/quantize_rows.cuh): with a scale for each row or for each 128 columns of one in one
// launch, with one scale for all in two, of which the first finds the largest number. A source defines GM_ENTRY, and
// GM_OVERLAP if a launch may begin before the one before it ends (sm_90 and newer), and includes this.
#pragma once
#include <cstdint>

#include "gm_cuda.h"
#include "sm90/quantize_rows.cuh"

struct QuantizeFp8Params {
  const uint16_t* x;
  uint8_t* codes;  // [m, k]
  float* scales;   // [m], of the tensor all alike; of groups [groups, pitch]
  float* maxima;   // of the tensor: [parts]
  int64_t ldx;
  int m, k, pitch, parts;
};

#ifdef __CUDACC__

namespace {

using namespace gm::quantize;

// Lets the next launch begin, and waits for what the one before has written.
__device__ __forceinline__ void overlap() {
#ifdef GM_OVERLAP
  gm::griddepcontrol_launch_dependents();
  gm::griddepcontrol_wait();
#endif
}
__device__ __forceinline__ const uint4* row_of(const QuantizeFp8Params& p, int row) {
  return reinterpret_cast<const uint4*>(p.x + row * p.ldx);
}
__device__ __forceinline__ uint2* codes_of_row(const QuantizeFp8Params& p, int row) {
  return reinterpret_cast<uint2*>(p.codes + static_cast<int64_t>(row) * p.k);
}

// One CTA per row.
template <bool HALF>
__device__ __forceinline__ void quantize_row_to_e4m3(const QuantizeFp8Params& p) {
  const int row = blockIdx.x, vectors = p.k / kVector;
  const uint4* x = row_of(p, row);
  const auto load = [&](int at) { return x[at]; };
  uint4 kept[kKept];
  load_row(kept, vectors, load);
  const float scale = row_scale<HALF, false>(kept, vectors, load);
  int sum = 0;
  write_codes<HALF, false>(codes_of_row(p, row), kept, vectors, load, scale, sum);
  if (threadIdx.x == 0) p.scales[row] = scale;
}

// Sixteen lanes per group of 128 columns.
template <bool HALF>
__device__ __forceinline__ void quantize_groups_to_e4m3(const QuantizeFp8Params& p) {
  const Group at(p.m, p.k);
  const uint4 word =
      at.here ? *reinterpret_cast<const uint4*>(p.x + at.row * p.ldx + at.column) : make_uint4(0, 0, 0, 0);
  const float scale = group_scale<HALF>(word);
  int sum = 0;
  if (at.here)
    *reinterpret_cast<uint2*>(p.codes + at.row * p.k + at.column) = codes_of<HALF, false>(word, scale, sum);
  if (at.row < p.m && at.lane == 0) p.scales[static_cast<int64_t>(at.group) * p.pitch + at.row] = scale;
}

// The largest number of every `parts`-th row.
template <bool HALF>
__device__ __forceinline__ void find_maximum(const QuantizeFp8Params& p) {
  float amax = 0.f;
  for (int row = blockIdx.x; row < p.m; row += p.parts)
    for (int at = threadIdx.x; at < p.k / kVector; at += kThreads)
      amax = gm::fmax_nan(amax, amax_of<HALF>(row_of(p, row)[at]));
  amax = cta_max(amax);
  if (threadIdx.x == 0) p.maxima[blockIdx.x] = amax;
}
// One CTA per row.
template <bool HALF>
__device__ __forceinline__ void quantize_by_maxima(const QuantizeFp8Params& p) {
  const float amax = cta_max(static_cast<int>(threadIdx.x) < p.parts ? p.maxima[threadIdx.x] : 0.f);
  const float scale = __fdiv_rn(gm::fmax_nan(amax, 1e-10f), 448.f);
  int sum = 0;
  for (int at = threadIdx.x; at < p.k / kVector; at += kThreads)
    codes_of_row(p, blockIdx.x)[at] = codes_of<HALF, false>(row_of(p, blockIdx.x)[at], scale, sum);
  if (threadIdx.x == 0) p.scales[blockIdx.x] = scale;
}

}  // namespace

#define GM_QUANTIZER(name, function)                                                                         \
  extern "C" __global__ void __launch_bounds__(kThreads) name(const __grid_constant__ QuantizeFp8Params p) { \
    overlap();                                                                                               \
    function(p);                                                                                             \
  }
#define GM_QUANTIZE_FP8(type, half)                                     \
  GM_QUANTIZER(quantize_fp8_token_##type, quantize_row_to_e4m3<half>)   \
  GM_QUANTIZER(quantize_fp8_g128_##type, quantize_groups_to_e4m3<half>) \
  GM_QUANTIZER(quantize_fp8_##type, quantize_by_maxima<half>)           \
  GM_QUANTIZER(largest_##type, find_maximum<half>)
GM_QUANTIZE_FP8(fp16, true)
GM_QUANTIZE_FP8(bf16, false)

#else
#include "args.h"

namespace {
#ifdef GM_OVERLAP
constexpr bool kOverlap = true;
#else
constexpr bool kOverlap = false;
#endif
gm::CudaKernel g_kernels[3][2] = {
    {{GM_CUBIN, "quantize_fp8_token_fp16"}, {GM_CUBIN, "quantize_fp8_token_bf16"}},
    {{GM_CUBIN, "quantize_fp8_g128_fp16"}, {GM_CUBIN, "quantize_fp8_g128_bf16"}},
    {{GM_CUBIN, "quantize_fp8_fp16"}, {GM_CUBIN, "quantize_fp8_bf16"}}};
gm::CudaKernel g_largest[2] = {{GM_CUBIN, "largest_fp16"}, {GM_CUBIN, "largest_bf16"}};
}  // namespace

GM_CUDA_ARGS(GM_ENTRY, GmQuantizeFp8Sm89Args)(const GmQuantizeFp8Sm89Args* args) {
  const GmQuantizeFp8Sm89Args& a = *args;
  if (a.x_type != 1 && a.x_type != 2) return GM_E_DTYPE;
  if (a.format < 0 || a.format > 2) return GM_E_ARG;
  if (a.m < 0 || a.k < 1 || a.k % 16 || a.ldx % 8 || !gm::is_aligned(a.x)) return GM_E_SHAPE;
  if (a.format == 1 && a.pitch < a.m) return GM_E_SHAPE;
  if (a.format == 2 && a.maxima == nullptr) return GM_E_ARG;
  const int64_t threads = int64_t(a.m) * gm::ceil_div(a.k, 128) * 16;
  if (threads > int64_t(INT32_MAX) * 256) return GM_E_SHAPE;
  if (a.m == 0) return GM_OK;
  QuantizeFp8Params p{static_cast<const uint16_t*>(a.x),
                      static_cast<uint8_t*>(a.codes),
                      a.scales,
                      a.maxima,
                      a.ldx,
                      a.m,
                      a.k,
                      a.pitch,
                      a.m < 256 ? a.m : 256};
  void* arguments[] = {&p};
  const int type = a.x_type - 1;
  if (a.format == 2) {
    const int code = g_largest[type].launch(
        a.device, a.stream, {.grid_x = unsigned(p.parts), .block = 256, .pdl = kOverlap}, arguments);
    if (code != GM_OK) return code;
  }
  const unsigned grid = a.format == 1 ? unsigned((threads + 255) / 256) : unsigned(a.m);
  return g_kernels[a.format][type].launch(a.device, a.stream, {.grid_x = grid, .block = 256, .pdl = kOverlap},
                                          arguments);
}

#endif
