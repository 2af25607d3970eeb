// Rows of fp16 or bf16 to NVFP4, MXFP4 or MXFP8: the rules of quant/activations.py, bit for bit. Codes and scales are row-major, as weights
// have them. NVFP4 has a factor of all rows, or one for each.
#include <cstdint>

#include "gm_cuda.h"
#include "sm120/block_formats.h"
#include "sm90/quantize_rows.cuh"

struct QuantizeBlocksParams {
  const uint16_t* x;
  uint8_t *codes, *scales;
  float *factor,
      *maxima;  // of NVFP4: the factor of x, or those of its rows; the largest magnitudes of `parts` parts of x
  int64_t ldx, vectors;  // vectors: of eight columns, of all rows
  int row_vectors, parts;
};

#ifdef __CUDACC__
namespace gm::quantize {

// The vector of a number.
__device__ __forceinline__ uint4 vector_at(const QuantizeBlocksParams& p, int64_t index) {
  const int64_t row = index / p.row_vectors;
  return reinterpret_cast<const uint4*>(p.x + row * p.ldx)[index - row * p.row_vectors];
}

// The largest magnitude of a part of x.
template <bool HALF>
__device__ __forceinline__ void write_maximum(const QuantizeBlocksParams& p) {
  float amax = 0.f;
#pragma unroll 1
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < p.vectors;
       i += static_cast<int64_t>(gridDim.x) * kThreads)
    amax = fmax_nan(amax, amax_of<HALF>(vector_at(p, i)));
  amax = cta_max(amax);
  if (threadIdx.x == 0) p.maxima[blockIdx.x] = amax;
}

// The code of e2m1 nearest to a number, ties to even, saturating: half steps below 2, steps below 4, steps of 2 above.
__device__ __forceinline__ uint32_t e2m1_of(float v) {
  const float size = fabsf(v);
  const int code = size < 2.f   ? __float2int_rn(size * 2.f)
                   : size < 4.f ? __float2int_rn(size) + 2
                                : min(__float2int_rn(fminf(size, 8.f) * 0.5f) + 4, 7);
  return code | (__float_as_uint(v) >> 31 << 3);
}

// The factor of numbers of NVFP4 whose largest magnitude is this.
__device__ __forceinline__ float factor_of(float amax) {
  return __fdiv_rn(fmax_nan(amax, 1e-10f), 2688.f);  // 6 times 448
}

// The codes and the scale of a vector of x, if it is `here`; by a whole warp. The lanes of a group follow each other, and groups do not cross
// rows.
template <typename Format, bool HALF>
__device__ __forceinline__ void write_vector(const QuantizeBlocksParams& p, int64_t index, bool here,
                                             const uint4& word, float factor) {
  constexpr int kLanes = Format::kGroup / kVector;
  float amax = amax_of<HALF>(word);
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2)
    amax = fmax_nan(amax, __shfl_xor_sync(0xffffffffu, amax, step));
  uint32_t byte;
  float divisor;
  if constexpr (Format::kGroup == 16) {
    const float scale = fminf(fmaxf(__fdiv_rn(amax, __fmul_rn(6.f, factor)), 0x1p-9f), 448.f);
    byte = packed_e4m3(scale, scale) & 0xff;
    const uint2 widened = e4m3_to_f16(byte);
    divisor = __fmul_rn(__half2float(*reinterpret_cast<const __half*>(&widened.x)), factor);
  } else {
    const int exponent = __float_as_uint(amax) >> 23, largest = Format::kBits == 4 ? 2 : 8;
    byte = exponent == 255 ? 255 : max(exponent - largest, 0);
    divisor = __uint_as_float(byte == 0 ? 0x400000u : byte << 23);  // byte 255: infinity
  }
  float v[kVector];
  widen<HALF>(word, v);
  uint32_t packed[2] = {};
#pragma unroll
  for (int i = 0; i < kVector; i += 2) {
    const float low = __fdiv_rn(v[i], divisor), high = __fdiv_rn(v[i + 1], divisor);
    if constexpr (Format::kBits == 4)
      packed[0] |= (e2m1_of(low) | e2m1_of(high) << 4) << i * 4;
    else
      packed[i / 4] |= static_cast<uint32_t>(packed_e4m3(low, high)) << i % 4 * 8;
  }
  if (!here) return;
  if constexpr (Format::kBits == 4)
    reinterpret_cast<uint32_t*>(p.codes)[index] = packed[0];
  else
    reinterpret_cast<uint2*>(p.codes)[index] = make_uint2(packed[0], packed[1]);
  if (index % kLanes == 0) p.scales[index / kLanes] = static_cast<uint8_t>(byte);
}

// A vector per thread.
template <typename Format, bool HALF>
__device__ __forceinline__ void quantize_blocks(const QuantizeBlocksParams& p) {
  float factor = 1.f;
  if constexpr (Format::kGroup == 16) {
    const float part = threadIdx.x < p.parts ? p.maxima[threadIdx.x] : 0.f;
    factor = factor_of(cta_max(part));
    if (blockIdx.x == 0 && threadIdx.x == 0) *p.factor = factor;
  }
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const bool here = index < p.vectors;
  write_vector<Format, HALF>(p, index, here, here ? vector_at(p, index) : make_uint4(0, 0, 0, 0), factor);
}

// NVFP4 with a factor for each row: a row per CTA, read twice.
template <bool HALF>
__device__ __forceinline__ void quantize_rows(const QuantizeBlocksParams& p) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * p.row_vectors;
  float amax = 0.f;
#pragma unroll 1
  for (int i = threadIdx.x; i < p.row_vectors; i += kThreads)
    amax = fmax_nan(amax, amax_of<HALF>(vector_at(p, first + i)));
  const float factor = factor_of(cta_max(amax));
  if (threadIdx.x == 0) p.factor[blockIdx.x] = factor;
#pragma unroll 1
  for (int start = 0; start < p.row_vectors; start += kThreads) {
    const int64_t index = first + start + threadIdx.x;
    const bool here = start + static_cast<int>(threadIdx.x) < p.row_vectors;
    write_vector<Nvfp4, HALF>(p, index, here, here ? vector_at(p, index) : make_uint4(0, 0, 0, 0), factor);
  }
}

}  // namespace gm::quantize

#define GM_QUANTIZE(name, type, ...)                                   \
  extern "C" __global__ void __launch_bounds__(gm::quantize::kThreads) \
      name##_##type(const __grid_constant__ QuantizeBlocksParams p) {  \
    gm::quantize::__VA_ARGS__(p);                                      \
  }
GM_QUANTIZE(maxima, fp16, write_maximum<true>)
GM_QUANTIZE(maxima, bf16, write_maximum<false>)
GM_QUANTIZE(nvfp4, fp16, quantize_blocks<gm::Nvfp4, true>)
GM_QUANTIZE(nvfp4, bf16, quantize_blocks<gm::Nvfp4, false>)
GM_QUANTIZE(nvfp4_rows, fp16, quantize_rows<true>)
GM_QUANTIZE(nvfp4_rows, bf16, quantize_rows<false>)
GM_QUANTIZE(mxfp4, fp16, quantize_blocks<gm::Mxfp4, true>)
GM_QUANTIZE(mxfp4, bf16, quantize_blocks<gm::Mxfp4, false>)
GM_QUANTIZE(mxfp8, fp16, quantize_blocks<gm::Mxfp8, true>)
GM_QUANTIZE(mxfp8, bf16, quantize_blocks<gm::Mxfp8, false>)

#else
#include "args.h"

namespace {
constexpr int kThreads = 256, kMostParts = 256;
gm::CudaKernel g_maxima[2] = {{GM_CUBIN, "maxima_fp16"}, {GM_CUBIN, "maxima_bf16"}};
gm::CudaKernel g_rows[2] = {{GM_CUBIN, "nvfp4_rows_fp16"}, {GM_CUBIN, "nvfp4_rows_bf16"}};
gm::CudaKernel g_quantize[3][2] = {{{GM_CUBIN, "nvfp4_fp16"}, {GM_CUBIN, "nvfp4_bf16"}},
                                   {{GM_CUBIN, "mxfp4_fp16"}, {GM_CUBIN, "mxfp4_bf16"}},
                                   {{GM_CUBIN, "mxfp8_fp16"}, {GM_CUBIN, "mxfp8_bf16"}}};
}  // namespace

GM_CUDA_ARGS(gm_quantize_blocks_sm120f, GmQuantizeBlocksArgs)(const GmQuantizeBlocksArgs* args) {
  const GmQuantizeBlocksArgs& a = *args;
  if (a.x_type != 1 && a.x_type != 2) return GM_E_DTYPE;
  if (a.m < 0 || a.k < 1 || a.k % 128 || a.ldx % 8 || a.ldx < a.k || !gm::is_aligned(a.x)) return GM_E_SHAPE;
  if (a.format < 0 || a.format > 2 || (a.by_row && a.format != 0)) return GM_E_ARG;
  if (a.m == 0) return GM_OK;
  QuantizeBlocksParams p{};
  p.x = static_cast<const uint16_t*>(a.x), p.ldx = a.ldx;
  p.codes = static_cast<uint8_t*>(a.codes), p.scales = static_cast<uint8_t*>(a.scales);
  p.factor = a.factor, p.maxima = a.maxima;
  p.row_vectors = a.k / 8, p.vectors = int64_t(a.m) * p.row_vectors;
  const int64_t ctas = (p.vectors + kThreads - 1) / kThreads;
  if (ctas > INT32_MAX) return GM_E_SHAPE;
  void* arguments[] = {&p};
  if (a.format == 0 && (a.factor == nullptr || (a.maxima == nullptr && !a.by_row))) return GM_E_ARG;
  if (a.by_row)
    return g_rows[a.x_type - 1].launch(a.device, a.stream, {.grid_x = unsigned(a.m), .block = kThreads},
                                       arguments);
  if (a.format == 0) {
    p.parts = ctas < kMostParts ? int(ctas) : kMostParts;
    const int status = g_maxima[a.x_type - 1].launch(
        a.device, a.stream, {.grid_x = unsigned(p.parts), .block = kThreads}, arguments);
    if (status != GM_OK) return status;
  }
  return g_quantize[a.format][a.x_type - 1].launch(a.device, a.stream,
                                                   {.grid_x = unsigned(ctas), .block = kThreads}, arguments);
}

#endif
