// Rows of fp16 or bf16 to e4m3 or int8 with a scale for each row, or for each 128 columns:
// quant/activations.py has the rules. One launch;
// what it reads stays in registers between the maximum and the rounding.
#include <cstdint>

#include "gm_cuda.h"
#include "sm90/ptx.cuh"

struct QuantizeParams {
  const uint16_t* x;
  uint8_t* codes;  // [m, k]
  float* scales;   // [m], or by groups [groups, pitch]
  int* sums;       // [m] of int8 codes
  int64_t ldx;
  int m, k, pitch;
};

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace {

constexpr int kVector = 8;  // values of a load of 16 bytes

template <bool HALF>
__device__ __forceinline__ void widen(const uint4& word, float (&v)[kVector]) {
  const uint32_t words[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (HALF) {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(words + i));
      v[i * 2] = pair.x, v[i * 2 + 1] = pair.y;
    } else {
      v[i * 2] = __uint_as_float(words[i] << 16), v[i * 2 + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }
}

template <bool HALF>
__device__ __forceinline__ float amax_of(const uint4& word) {
  float v[kVector], amax = 0.f;
  widen<HALF>(word, v);
#pragma unroll
  for (int i = 0; i < kVector; ++i) amax = gm::fmax_nan(amax, fabsf(v[i]));
  return amax;
}

// Eight codes of word / scale, e4m3 or int8; adds them to `sum` if int8.
template <bool HALF, bool INT8>
__device__ __forceinline__ uint2 codes_of(const uint4& word, float scale, int& sum) {
  float v[kVector];
  widen<HALF>(word, v);
  uint32_t packed[2] = {};
#pragma unroll
  for (int i = 0; i < kVector; i += 2) {
    const float low = __fdiv_rn(v[i], scale), high = __fdiv_rn(v[i + 1], scale);
    uint32_t pair;
    if constexpr (INT8) {
      const int a = min(max(__float2int_rn(low), -128), 127), b = min(max(__float2int_rn(high), -128), 127);
      sum += a + b;
      pair = (a & 0xff) | (b & 0xff) << 8;
    } else {
      pair = gm::packed_e4m3(low, high);
    }
    packed[i / 4] |= pair << (i % 4 * 8);
  }
  return make_uint2(packed[0], packed[1]);
}

constexpr int kRowThreads = 256, kKept = 4;

// A CTA takes a row.
template <bool HALF, bool INT8>
__device__ __forceinline__ void quantize_row(const QuantizeParams& p) {
  __shared__ float maxima[kRowThreads / 32];
  __shared__ int totals[kRowThreads / 32];
  const int row = blockIdx.x, vectors = p.k / kVector, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const uint4* x = reinterpret_cast<const uint4*>(p.x + row * p.ldx);
  uint2* to = reinterpret_cast<uint2*>(p.codes + static_cast<int64_t>(row) * p.k);
  gm::griddepcontrol_launch_dependents();
  gm::griddepcontrol_wait();
  uint4 kept[kKept];
  float amax = 0.f;
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const int at = threadIdx.x + i * kRowThreads;
    kept[i] = at < vectors ? x[at] : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int i = 0; i < kKept; ++i) amax = gm::fmax_nan(amax, amax_of<HALF>(kept[i]));
#pragma unroll 1
  for (int at = threadIdx.x + kKept * kRowThreads; at < vectors; at += kRowThreads)
    amax = gm::fmax_nan(amax, amax_of<HALF>(x[at]));
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    amax = gm::fmax_nan(amax, __shfl_xor_sync(0xffffffffu, amax, step));
  if (lane == 0) maxima[warp] = amax;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kRowThreads / 32; ++i) amax = gm::fmax_nan(amax, maxima[i]);
  const float scale = __fdiv_rn(gm::fmax_nan(amax, 1e-10f), INT8 ? 127.f : 448.f);
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const int at = threadIdx.x + i * kRowThreads;
    if (at < vectors) to[at] = codes_of<HALF, INT8>(kept[i], scale, sum);
  }
#pragma unroll 1
  for (int at = threadIdx.x + kKept * kRowThreads; at < vectors; at += kRowThreads)
    to[at] = codes_of<HALF, INT8>(x[at], scale, sum);
  if (threadIdx.x == 0) p.scales[row] = scale;
  if constexpr (INT8) {
    sum = __reduce_add_sync(0xffffffffu, sum);
    if (lane == 0) totals[warp] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int i = 1; i < kRowThreads / 32; ++i) sum += totals[i];
      p.sums[row] = sum;
    }
  }
}

// Sixteen lanes take 128 columns.
template <bool HALF>
__device__ __forceinline__ void quantize_groups(const QuantizeParams& p) {
  const int groups = (p.k + 127) / 128;
  const int64_t index = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 16;
  const int64_t row = index / groups;
  const int group = static_cast<int>(index - row * groups),
            column = group * 128 + (threadIdx.x & 15) * kVector;
  gm::griddepcontrol_launch_dependents();
  gm::griddepcontrol_wait();
  const bool here = row < p.m && column < p.k;
  const uint4 word =
      here ? *reinterpret_cast<const uint4*>(p.x + row * p.ldx + column) : make_uint4(0, 0, 0, 0);
  float amax = amax_of<HALF>(word);
#pragma unroll
  for (int step = 8; step > 0; step /= 2) amax = gm::fmax_nan(amax, __shfl_xor_sync(0xffffffffu, amax, step));
  const float scale = __fdiv_rn(gm::fmax_nan(amax, 1e-4f), 448.f);
  int sum = 0;
  if (here) *reinterpret_cast<uint2*>(p.codes + row * p.k + column) = codes_of<HALF, false>(word, scale, sum);
  if (row < p.m && (threadIdx.x & 15) == 0) p.scales[static_cast<int64_t>(group) * p.pitch + row] = scale;
}

}  // namespace

#define GM_QUANTIZE(type, half)                                                   \
  extern "C" __global__ void __launch_bounds__(kRowThreads)                       \
      quantize_rows_fp8_token_##type(const __grid_constant__ QuantizeParams p) {  \
    quantize_row<half, false>(p);                                                 \
  }                                                                               \
  extern "C" __global__ void __launch_bounds__(kRowThreads)                       \
      quantize_rows_int8_token_##type(const __grid_constant__ QuantizeParams p) { \
    quantize_row<half, true>(p);                                                  \
  }                                                                               \
  extern "C" __global__ void __launch_bounds__(256)                               \
      quantize_rows_fp8_g128_##type(const __grid_constant__ QuantizeParams p) {   \
    quantize_groups<half>(p);                                                     \
  }
GM_QUANTIZE(fp16, true)
GM_QUANTIZE(bf16, false)

#else

namespace {
gm::CudaKernel g_kernels[3][2] = {
    {{GM_CUBIN, "quantize_rows_fp8_token_fp16"}, {GM_CUBIN, "quantize_rows_fp8_token_bf16"}},
    {{GM_CUBIN, "quantize_rows_fp8_g128_fp16"}, {GM_CUBIN, "quantize_rows_fp8_g128_bf16"}},
    {{GM_CUBIN, "quantize_rows_int8_token_fp16"}, {GM_CUBIN, "quantize_rows_int8_token_bf16"}}};
}

// x [m, k] of fp16 (1) or bf16 (2), rows ldx apart, 16-byte aligned -> codes [m, k] and float32 scales.
// format: 0 fp8_token (scales [m]), 1 fp8_g128 (scales [groups, pitch]), 2 int8_token (scales [m], and sums
// of codes [m]).
GM_CUDA_ENTRY(gm_quantize_rows_sm90)
(void* codes, void* scales, void* sums, const void* x, int64_t ldx, int m, int k, int pitch, int format,
 int x_type, int device, void* stream) {
  if (x_type != 1 && x_type != 2) return GM_E_DTYPE;
  if (format < 0 || format > 2) return GM_E_ARG;
  if (m < 0 || k < 1 || k % 16 || ldx % 8 || reinterpret_cast<uintptr_t>(x) % 16) return GM_E_SHAPE;
  if (format == 1 && pitch < m) return GM_E_SHAPE;
  if (m == 0) return GM_OK;
  QuantizeParams p{static_cast<const uint16_t*>(x),
                   static_cast<uint8_t*>(codes),
                   static_cast<float*>(scales),
                   static_cast<int*>(sums),
                   ldx,
                   m,
                   k,
                   pitch};
  const int64_t threads = int64_t(m) * ((k + 127) / 128) * 16;
  if ((threads + 255) / 256 > INT32_MAX) return GM_E_SHAPE;
  void* args[] = {&p};
  return g_kernels[format][x_type - 1].launch(
      device, stream,
      {.grid_x = format == 1 ? unsigned((threads + 255) / 256) : unsigned(m), .block = 256, .pdl = true},
      args);
}

#endif
