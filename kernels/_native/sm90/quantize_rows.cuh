// Rows of fp16 or bf16 to e4m3 or int8 with a scale for each row, or for each 128 columns
// (quant/activations.py has the rules). What a kernel reads stays in registers between the maximum and the
// rounding.
#pragma once
#include "ptx.cuh"

#ifdef __CUDACC__
namespace gm::quantize {

constexpr int kVector = 8, kThreads = 256;  // values of a load of 16 bytes; threads of a CTA
constexpr int kKept = 4;                    // vectors of a row that a thread keeps

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
  for (int i = 0; i < kVector; ++i) amax = fmax_nan(amax, fabsf(v[i]));
  return amax;
}

// Eight codes of word / scale, e4m3 or int8; adds int8 ones to `sum`. The quotient is a multiplication with the scale's
// reciprocal and a correction: with 11 bits of x or fewer, that is the division rounded once, whatever the 24 bits of the
// scale (all pairs of significands were tried). Quotients of which a step underflows are far below the smallest code, for
// scales are 1e-10 / 448 or more. Negative zeros stay negative; with an infinite scale, whose reciprocal is 0, nothing is
// corrected.
template <bool HALF, bool INT8>
__device__ __forceinline__ uint2 codes_of(const uint4& word, float scale, int& sum) {
  const float inverse = __frcp_rn(scale), finite = inverse > 0.f ? scale : 0.f;
  float v[kVector];
  widen<HALF>(word, v);
  uint32_t packed[2] = {};
#pragma unroll
  for (int i = 0; i < kVector; i += 2) {
    float q[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float near = __fmul_rn(v[i + j], inverse);
      q[j] = __fmaf_rn(__fmaf_rn(near, finite, -v[i + j]), -inverse, near);
    }
    uint32_t pair;
    if constexpr (INT8) {
      const int a = min(max(__float2int_rn(q[0]), -128), 127), b = min(max(__float2int_rn(q[1]), -128), 127);
      sum += a + b;
      pair = (a & 0xff) | (b & 0xff) << 8;
    } else {
      pair = packed_e4m3(q[0], q[1]);
    }
    packed[i / 4] |= pair << (i % 4 * 8);
  }
  return make_uint2(packed[0], packed[1]);
}

// The largest number of a CTA, in all its threads.
__device__ __forceinline__ float cta_max(float v) {
  __shared__ float maxima[kThreads / 32];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) v = fmax_nan(v, __shfl_xor_sync(0xffffffffu, v, step));
  if ((threadIdx.x & 31) == 0) maxima[threadIdx.x >> 5] = v;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) v = fmax_nan(v, maxima[i]);
  return v;
}

// A row of `vectors` vectors, by a CTA. load: from the number of a vector to the vector.
template <typename Load>
__device__ __forceinline__ void load_row(uint4 (&kept)[kKept], int vectors, const Load& load) {
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const int at = threadIdx.x + i * kThreads;
    kept[i] = at < vectors ? load(at) : make_uint4(0, 0, 0, 0);
  }
}
template <bool HALF, bool INT8, typename Load>
__device__ __forceinline__ float row_scale(const uint4 (&kept)[kKept], int vectors, const Load& load) {
  float amax = 0.f;
#pragma unroll
  for (int i = 0; i < kKept; ++i) amax = fmax_nan(amax, amax_of<HALF>(kept[i]));
#pragma unroll 1
  for (int at = threadIdx.x + kKept * kThreads; at < vectors; at += kThreads)
    amax = fmax_nan(amax, amax_of<HALF>(load(at)));
  return __fdiv_rn(fmax_nan(cta_max(amax), 1e-10f), INT8 ? 127.f : 448.f);
}
// Writes the codes; adds int8 ones to `sum`.
template <bool HALF, bool INT8, typename Load>
__device__ __forceinline__ void write_codes(uint2* to, const uint4 (&kept)[kKept], int vectors,
                                            const Load& load, float scale, int& sum) {
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const int at = threadIdx.x + i * kThreads;
    if (at < vectors) to[at] = codes_of<HALF, INT8>(kept[i], scale, sum);
  }
#pragma unroll 1
  for (int at = threadIdx.x + kKept * kThreads; at < vectors; at += kThreads)
    to[at] = codes_of<HALF, INT8>(load(at), scale, sum);
}

// The scale of 128 columns of e4m3, of which each of sixteen lanes has a vector.
template <bool HALF>
__device__ __forceinline__ float group_scale(const uint4& word) {
  float amax = amax_of<HALF>(word);
#pragma unroll
  for (int step = 8; step > 0; step /= 2) amax = fmax_nan(amax, __shfl_xor_sync(0xffffffffu, amax, step));
  return __fdiv_rn(fmax_nan(amax, 1e-4f), 448.f);
}

// The group of 128 columns, of `m` rows of k columns, that sixteen lanes process, and the first column of
// this lane.
struct Group {
  int64_t row;
  int group, lane, column;
  bool here;
  __device__ __forceinline__ Group(int m, int k) {
    const int groups = (k + 127) / 128;
    lane = threadIdx.x & 15;
    const int64_t index = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 16;
    row = index / groups;
    group = static_cast<int>(index - row * groups), column = group * 128 + lane * kVector;
    here = row < m && column < k;
  }
};

}  // namespace gm::quantize
#endif
