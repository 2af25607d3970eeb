// What makes the 8-bit rows that products of experts multiply, sorted by expert: tokens, quantized once and
// copied to every expert that they go to, and silu(gate) * up of the first product's rows. The rules of
// quant/activations.py: e4m3 with a scale for each row, or for each 128 columns.
#include <cstdint>

#include "experts.h"
#include "gm_cuda.h"
#include "sm90/ptx.cuh"

struct MoeQuantizeParams {
  const uint16_t* x;  // tokens [m, k] with rows ldx apart; or gate and up [entries, 2 k]
  const int *ids, *inverse, *offsets;
  uint8_t* codes;  // [entries, k]
  float* scales;   // [entries], or by groups [groups, pitch]
  int64_t ldx;
  int m, top_k, k, experts, pitch;  // m: tokens, or entries
};

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace {

constexpr int kVector = 8, kThreads = 256, kKept = 4;  // values of 16 bytes; vectors that a thread keeps

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

// Eight codes of word / scale.
template <bool HALF>
__device__ __forceinline__ uint2 codes_of(const uint4& word, float scale) {
  float v[kVector];
  widen<HALF>(word, v);
  uint32_t packed[2] = {};
#pragma unroll
  for (int i = 0; i < kVector; i += 2) {
    const float high = __fdiv_rn(v[i + 1], scale), low = __fdiv_rn(v[i], scale);
    const uint16_t pair = gm::packed_e4m3(low, high);
    packed[i / 4] |= static_cast<uint32_t>(pair) << (i % 4 * 8);
  }
  return make_uint2(packed[0], packed[1]);
}

// silu(gate) * up in float32, rounded to the type of the rows.
template <bool HALF>
__device__ __forceinline__ uint4 gated(const uint4& gate, const uint4& up) {
  float g[kVector], u[kVector];
  widen<HALF>(gate, g), widen<HALF>(up, u);
  uint32_t r[4];
#pragma unroll
  for (int i = 0; i < kVector; i += 2) {
    const float low = __fdividef(g[i], 1.f + __expf(-g[i])) * u[i],
                high = __fdividef(g[i + 1], 1.f + __expf(-g[i + 1])) * u[i + 1];
    r[i / 2] = gm::packed<std::conditional_t<HALF, __half, __nv_bfloat16>>(low, high);
  }
  return make_uint4(r[0], r[1], r[2], r[3]);
}

// Calls each(place, expert) for the entries of a token that an expert of this rank has.
template <typename F>
__device__ __forceinline__ void over_places(const MoeQuantizeParams& p, int64_t token, const F& each) {
  constexpr int kTogether = 4;
#pragma unroll 1
  for (int first = 0; first < p.top_k; first += kTogether) {
    int place[kTogether], expert[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const bool there = first + i < p.top_k;
      place[i] = there ? __ldcg(p.inverse + token * p.top_k + first + i) : -1;
      expert[i] = there ? __ldcg(p.ids + token * p.top_k + first + i) : 0;
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      if (place[i] >= 0) each(place[i], expert[i]);
  }
}

// The largest number of a CTA, in all its threads.
__device__ __forceinline__ float largest(float amax) {
  __shared__ float maxima[kThreads / 32];
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    amax = gm::fmax_nan(amax, __shfl_xor_sync(0xffffffffu, amax, step));
  if ((threadIdx.x & 31) == 0) maxima[threadIdx.x >> 5] = amax;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) amax = gm::fmax_nan(amax, maxima[i]);
  return amax;
}

// A scale for each row: a CTA takes a token, or an entry of ids if GATED.
template <bool HALF, bool GATED>
__device__ __forceinline__ void quantize_rows(const MoeQuantizeParams& p) {
  const int vectors = p.k / kVector;
  int64_t row = blockIdx.x;
  if constexpr (GATED) {
    gm::griddepcontrol_wait();
    // Behind the wait: the launch after this one may then read what the launches before this one wrote.
    gm::griddepcontrol_launch_dependents();
    row = __ldcg(p.inverse + blockIdx.x);
    if (row < 0) return;
  }
  const uint4* x = reinterpret_cast<const uint4*>(p.x + row * p.ldx);
  const auto vector_at = [&](int at) {
    if constexpr (GATED)
      return gated<HALF>(__ldcg(x + at), __ldcg(x + vectors + at));
    else
      return x[at];
  };
  uint4 kept[kKept];
  float amax = 0.f;
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const int at = threadIdx.x + i * kThreads;
    kept[i] = at < vectors ? vector_at(at) : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int i = 0; i < kKept; ++i) amax = gm::fmax_nan(amax, amax_of<HALF>(kept[i]));
#pragma unroll 1
  for (int at = threadIdx.x + kKept * kThreads; at < vectors; at += kThreads)
    amax = gm::fmax_nan(amax, amax_of<HALF>(vector_at(at)));
  const float scale = __fdiv_rn(gm::fmax_nan(largest(amax), 1e-10f), 448.f);
  const auto write = [&](int64_t place) {
    uint2* to = reinterpret_cast<uint2*>(p.codes + place * p.k);
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const int at = threadIdx.x + i * kThreads;
      if (at < vectors) to[at] = codes_of<HALF>(kept[i], scale);
    }
#pragma unroll 1
    for (int at = threadIdx.x + kKept * kThreads; at < vectors; at += kThreads)
      to[at] = codes_of<HALF>(vector_at(at), scale);
    if (threadIdx.x == 0) p.scales[place] = scale;
  };
  if constexpr (GATED) {
    write(row);
  } else {
    gm::griddepcontrol_wait();
    // Behind the wait: the launch after this one may then read what the launches before this one wrote.
    gm::griddepcontrol_launch_dependents();
    over_places(p, row, [&](int place, int) { write(place); });
  }
}

// A scale for 128 columns: sixteen lanes take them, of a token, or of an entry of ids if GATED.
template <bool HALF, bool GATED>
__device__ __forceinline__ void quantize_groups(const MoeQuantizeParams& p) {
  const int groups = (p.k + 127) / 128, lane = threadIdx.x & 15;
  const int64_t index = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 16;
  const int64_t item = index / groups;
  const int group = static_cast<int>(index - item * groups), column = group * 128 + lane * kVector;
  const bool here = item < p.m && column < p.k;
  uint4 word = make_uint4(0, 0, 0, 0);
  int64_t row = item;
  if constexpr (GATED) {
    gm::griddepcontrol_wait();
    // Behind the wait: the launch after this one may then read what the launches before this one wrote.
    gm::griddepcontrol_launch_dependents();
    row = item < p.m ? __ldcg(p.inverse + item) : -1;
    if (here && row >= 0) {
      const uint4* gate = reinterpret_cast<const uint4*>(p.x + row * p.ldx + column);
      word = gated<HALF>(__ldcg(gate), __ldcg(gate + p.k / kVector));
    }
  } else if (here) {
    word = *reinterpret_cast<const uint4*>(p.x + row * p.ldx + column);
  }
  float amax = amax_of<HALF>(word);
#pragma unroll
  for (int step = 8; step > 0; step /= 2) amax = gm::fmax_nan(amax, __shfl_xor_sync(0xffffffffu, amax, step));
  const float scale = __fdiv_rn(gm::fmax_nan(amax, 1e-4f), 448.f);
  const uint2 codes = codes_of<HALF>(word, scale);
  const auto write = [&](int place, int expert) {
    if (here) *reinterpret_cast<uint2*>(p.codes + static_cast<int64_t>(place) * p.k + column) = codes;
    if (lane == 0) {
      const int start = __ldcg(p.offsets + expert);
      p.scales[static_cast<int64_t>(group) * p.pitch + gm::w8a8::scale_column(start, expert) + place -
               start] = scale;
    }
  };
  if constexpr (GATED) {
    if (row >= 0) write(static_cast<int>(row), __ldcg(p.ids + item));
  } else {
    gm::griddepcontrol_wait();
    // Behind the wait: the launch after this one may then read what the launches before this one wrote.
    gm::griddepcontrol_launch_dependents();
    if (item < p.m) over_places(p, item, write);
  }
}

}  // namespace

#define GM_KERNELS(type, half)                                                          \
  extern "C" __global__ void __launch_bounds__(kThreads)                                \
      experts_quantize_token_##type(const __grid_constant__ MoeQuantizeParams p) {      \
    quantize_rows<half, false>(p);                                                      \
  }                                                                                     \
  extern "C" __global__ void __launch_bounds__(kThreads)                                \
      experts_quantize_g128_##type(const __grid_constant__ MoeQuantizeParams p) {       \
    quantize_groups<half, false>(p);                                                    \
  }                                                                                     \
  extern "C" __global__ void __launch_bounds__(kThreads)                                \
      experts_silu_quantize_token_##type(const __grid_constant__ MoeQuantizeParams p) { \
    quantize_rows<half, true>(p);                                                       \
  }                                                                                     \
  extern "C" __global__ void __launch_bounds__(kThreads)                                \
      experts_silu_quantize_g128_##type(const __grid_constant__ MoeQuantizeParams p) {  \
    quantize_groups<half, true>(p);                                                     \
  }
GM_KERNELS(fp16, true)
GM_KERNELS(bf16, false)

#else

namespace {
// [gated][by groups][bf16]
gm::CudaKernel g_kernels[2][2][2] = {
    {{{GM_CUBIN, "experts_quantize_token_fp16"}, {GM_CUBIN, "experts_quantize_token_bf16"}},
     {{GM_CUBIN, "experts_quantize_g128_fp16"}, {GM_CUBIN, "experts_quantize_g128_bf16"}}},
    {{{GM_CUBIN, "experts_silu_quantize_token_fp16"}, {GM_CUBIN, "experts_silu_quantize_token_bf16"}},
     {{GM_CUBIN, "experts_silu_quantize_g128_fp16"}, {GM_CUBIN, "experts_silu_quantize_g128_bf16"}}}};
}  // namespace

// x [tokens, k] of fp16 (1) or bf16 (2) with rows ldx apart, or, gated, gate and up [tokens * top_k, 2 k] in
// the order of experts -> codes [tokens * top_k, k] and float32 scales in that order. groups: scales of 128
// columns, [groups, pitch].
GM_CUDA_ENTRY(gm_moe_quantize_sm90)
(void* codes, void* scales, const void* x, int64_t ldx, const int* ids, const int* inverse,
 const int* offsets, int64_t tokens, int top_k, int k, int experts, int gated, int groups, int type,
 int device, void* stream) {
  if (type != 1 && type != 2) return GM_E_DTYPE;
  if (tokens < 0 || top_k < 1 || tokens * top_k > INT32_MAX || k < 1 || k % 16 || experts < 1)
    return GM_E_SHAPE;
  if (ldx % 8 || ldx < (gated ? 2 * int64_t(k) : k) || reinterpret_cast<uintptr_t>(x) % 16) return GM_E_SHAPE;
  const int64_t entries = tokens * top_k, pitch = gm::w8a8::scale_pitch(entries, experts);
  const int64_t items = gated ? entries : tokens, threads = items * ((k + 127) / 128) * 16;
  if (pitch > INT32_MAX || (threads + 255) / 256 > INT32_MAX) return GM_E_SHAPE;
  if (tokens == 0) return GM_OK;
  MoeQuantizeParams p{static_cast<const uint16_t*>(x),
                      ids,
                      inverse,
                      offsets,
                      static_cast<uint8_t*>(codes),
                      static_cast<float*>(scales),
                      ldx,
                      int(items),
                      top_k,
                      k,
                      experts,
                      int(pitch)};
  void* args[] = {&p};
  return g_kernels[gated != 0][groups != 0][type - 1].launch(
      device, stream,
      {.grid_x = groups ? unsigned((threads + 255) / 256) : unsigned(items), .block = 256, .pdl = true},
      args);
}

#endif
