// Lamport-style protocol of the collectives (as in NVIDIA TensorRT-LLM, allReduceFusion): ranks push vectors of 16 bytes.
//
// A rank writes its values into the memory of its peers, where arrival is visible in the data itself: empty memory holds
// kEmpty in every word, which no value has. So there is no barrier and no flag, and a sum takes one trip over the link.
//
// Triple buffering: call e uses buffer e % 3 and clears that of call e - 1. A peer writes into the latter in its call
// e + 2, after its call e + 1, which waits for values that this rank sends in its call e + 1, so after it was cleared.
// The number of the call is in device memory, so that replays of a CUDA graph count too.
#pragma once
#include <cstdint>

#include "gm_cuda.h"
#include "sm90/ptx.cuh"

constexpr int kMaxRanks = 8, kBuffers = 3;

struct PushParams {
  uint64_t peers[kMaxRanks];  // the buffers of each rank, mapped here
  // Number of the call, CTAs that have read it, vectors of the previous call, whether one timed out.
  uint32_t* state;
  uint32_t* failed;  // in host memory: 1 + the rank that timed out
  int64_t limit;     // timeout for a vector, in nanoseconds
  int64_t capacity;  // vectors of a buffer
  int rank, world;
};

#ifndef __CUDACC__
// From the options of an entry; peers is the address of the addresses of `world` buffers. World 0 if world or rank is
// invalid.
template <typename Options>
PushParams push_params(const Options& options) {
  PushParams p{};
  if (options.world < 2 || options.world > kMaxRanks || options.rank < 0 || options.rank >= options.world ||
      options.sms < 1)
    return p;
  for (int i = 0; i < options.world; ++i) p.peers[i] = reinterpret_cast<const uint64_t*>(options.peers)[i];
  p.state = reinterpret_cast<uint32_t*>(options.state),
  p.failed = reinterpret_cast<uint32_t*>(options.failed);
  p.limit = options.limit, p.capacity = options.capacity;
  p.rank = int(options.rank), p.world = int(options.world);
  return p;
}
#endif

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace push {

constexpr uint32_t kEmpty = 0x80000000u;

__device__ __forceinline__ uint4 load_relaxed(const uint4* from) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_relaxed(uint4* to, const uint4& v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};"
               :
               : "l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ bool has_arrived(const uint4& v) {
  return v.x != kEmpty && v.y != kEmpty && v.z != kEmpty && v.w != kEmpty;
}

// Replaces the word kEmpty, -0 (of a pair of 16-bit values, -0 above +0), by +0. Every rank adds what was sent, its own
// values too, so that all ranks get the same bits.
__device__ __forceinline__ uint4 without_empty(uint4 v) {
  v.x = v.x == kEmpty ? 0 : v.x;
  v.y = v.y == kEmpty ? 0 : v.y;
  v.z = v.z == kEmpty ? 0 : v.z;
  v.w = v.w == kEmpty ? 0 : v.w;
  return v;
}

__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// Waits for one vector, with a timeout, so that a dead peer does not hang this kernel: the failure is recorded for the
// host, and this call and later ones end with undefined sums.
__device__ __noinline__ uint4 wait(const uint4* from, const PushParams& p, int source) {
  const uint64_t begin = nanoseconds();
  uint4 v;
  for (int tries = 1; !has_arrived(v = load_relaxed(from)); ++tries) {
    if (tries % 1024 != 0) continue;
    const bool late = nanoseconds() - begin > uint64_t(p.limit);
    if (late) {
      *reinterpret_cast<volatile uint32_t*>(p.failed) = 1u + source;
      __threadfence_system();
      atomicExch(p.state + 3, 1u);
    }
    if (late || *reinterpret_cast<volatile uint32_t*>(p.state + 3)) return without_empty(v);
  }
  return v;
}

template <typename T>
constexpr int kValues = 16 / sizeof(T);

template <typename T>
__device__ __forceinline__ void add(float (&sum)[kValues<T>], const uint4& v) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      sum[i] += __uint_as_float(words[i]);
    } else if constexpr (std::is_same_v<T, __half>) {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(words + i));
      sum[2 * i] += pair.x, sum[2 * i + 1] += pair.y;
    } else {
      sum[2 * i] += __uint_as_float(words[i] << 16),
          sum[2 * i + 1] += __uint_as_float(words[i] & 0xffff0000u);
    }
  }
}

template <typename T>
__device__ __forceinline__ uint4 rounded(const float (&sum)[kValues<T>]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      words[i] = __float_as_uint(sum[i]);
    } else if constexpr (std::is_same_v<T, __half>) {
      const __half2 pair = __floats2half2_rn(sum[2 * i], sum[2 * i + 1]);
      words[i] = *reinterpret_cast<const uint32_t*>(&pair);
    } else {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(sum[2 * i], sum[2 * i + 1]);
      words[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
  }
  return {words[0], words[1], words[2], words[3]};
}

// `count` values: fewer than a vector only at the end of the tensor.
template <typename T>
__device__ __forceinline__ uint4 load(const T* from, int count = kValues<T>) {
  if (count >= kValues<T>) return __ldcg(reinterpret_cast<const uint4*>(from));
  uint4 v{};
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const uint32_t bits = sizeof(T) == 4 ? *reinterpret_cast<const uint32_t*>(from + i)
                                         : *reinterpret_cast<const uint16_t*>(from + i);
    const uint32_t shifted = bits << i * sizeof(T) % 4 * 8;
    const int word = i * sizeof(T) / 4;
    v.x |= word == 0 ? shifted : 0, v.y |= word == 1 ? shifted : 0, v.z |= word == 2 ? shifted : 0;
    v.w |= word == 3 ? shifted : 0;
  }
  return v;
}

template <typename T>
__device__ __forceinline__ void store(T* to, const uint4& v, int count = kValues<T>) {
  if (count >= kValues<T>) {
    *reinterpret_cast<uint4*>(to) = v;
    return;
  }
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const int word = i * sizeof(T) / 4;
    const uint32_t bits = (word == 0   ? v.x
                           : word == 1 ? v.y
                           : word == 2 ? v.z
                                       : v.w) >>
                          i * sizeof(T) % 4 * 8;
    if constexpr (sizeof(T) == 4)
      *reinterpret_cast<uint32_t*>(to + i) = bits;
    else
      *reinterpret_cast<uint16_t*>(to + i) = bits;
  }
}

// State of one call.
struct Call {
  const PushParams& p;
  uint32_t number, last;

  __device__ __forceinline__ explicit Call(const PushParams& params) : p(params) {
    number = *reinterpret_cast<volatile uint32_t*>(p.state);
    last = *reinterpret_cast<volatile uint32_t*>(p.state + 2);
  }

  // Receive slot of the values of `source` in the memory of `owner`. stride: vectors per source.
  __device__ __forceinline__ uint4* slot(int owner, int source, int64_t stride) const {
    return reinterpret_cast<uint4*>(p.peers[owner]) + number % kBuffers * p.capacity +
           (source < owner ? source : source - 1) * stride;
  }

  // Clears the buffer of the previous call, and signals that this CTA has read the call's number; the last CTA
  // increments it. By all threads, after their stores.
  __device__ __forceinline__ void finish_sends(uint32_t used) const {
    uint4* old = reinterpret_cast<uint4*>(p.peers[p.rank]) + (number + kBuffers - 1) % kBuffers * p.capacity;
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < last; i += gridDim.x * blockDim.x)
      old[i] = {kEmpty, kEmpty, kEmpty, kEmpty};
    __syncthreads();
    if (threadIdx.x == 0 && atomicInc(p.state + 1, gridDim.x - 1) == gridDim.x - 1) {
      p.state[2] = used;
      p.state[0] = number + 1;
    }
  }

  // Adds vector `i` of all ranks' slots in the order of ranks. own: the vector that this rank has sent.
  template <typename T, int W>
  __device__ __forceinline__ void sum(float (&total)[kValues<T>], const uint4& own, int64_t stride,
                                      int64_t i) const {
    uint4 v[W];
#pragma unroll
    for (int s = 0; s < W; ++s)
      if (s < p.world && s != p.rank) v[s] = load_relaxed(slot(p.rank, s, stride) + i);
#pragma unroll
    for (int s = 0; s < W; ++s) {
      if (s >= p.world) continue;
      if (s == p.rank)
        v[s] = own;
      else if (!has_arrived(v[s]))
        v[s] = wait(slot(p.rank, s, stride) + i, p, s);
      add<T>(total, v[s]);
    }
  }
};

}  // namespace push
#endif
