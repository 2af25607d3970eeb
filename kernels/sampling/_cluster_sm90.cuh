// Hardware primitives of the sampler, which tests/native/cluster_fibers.h has for a CPU; sm90/ptx.cuh has more.
#pragma once

#include <cstdint>

#include "sm90/ptx.cuh"

#define GM_DEVICE __device__ __forceinline__

namespace gm {

constexpr unsigned kAll = 0xffffffffu;

GM_DEVICE int thread() { return int(threadIdx.x); }
GM_DEVICE int threads() { return int(blockDim.x); }
GM_DEVICE int64_t block() { return blockIdx.x; }
GM_DEVICE void block_sync() { __syncthreads(); }
GM_DEVICE void warp_sync() { __syncwarp(); }

GM_DEVICE int warp_max(int v) { return __reduce_max_sync(kAll, v); }
GM_DEVICE uint32_t ballot(bool v) { return __ballot_sync(kAll, v); }
GM_DEVICE uint64_t shuffle_up(uint64_t v, int by) { return __shfl_up_sync(kAll, v, by); }
GM_DEVICE uint64_t shuffle_xor(uint64_t v, int mask) { return __shfl_xor_sync(kAll, v, mask); }
GM_DEVICE int popcount(uint32_t v) { return __popc(v); }

template <typename T>
GM_DEVICE T atomic_add(T* at, T v) {
  return atomicAdd(at, v);
}
template <>
GM_DEVICE uint64_t atomic_add(uint64_t* at, uint64_t v) {
  return atomicAdd(reinterpret_cast<unsigned long long*>(at), static_cast<unsigned long long>(v));
}
GM_DEVICE void atomic_min(int* at, int v) { atomicMin(at, v); }

GM_DEVICE float load_one(const float* from) { return __ldcg(from); }
GM_DEVICE float load_one(const uint16_t* from) {
  return __uint_as_float(uint32_t(__ldcg(from)) << 16);
}  // bf16
GM_DEVICE float4 load_four(const float* from) { return __ldcg(reinterpret_cast<const float4*>(from)); }
GM_DEVICE float4 load_four(const uint16_t* from) {
  const uint2 v = __ldcg(reinterpret_cast<const uint2*>(from));
  return float4{__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xffff0000u), __uint_as_float(v.y << 16),
                __uint_as_float(v.y & 0xffff0000u)};
}

GM_DEVICE float quotient(float a, float b) { return __fdiv_rn(a, b); }
GM_DEVICE int bits_of(float v) { return __float_as_int(v); }
GM_DEVICE float float_of(int v) { return __int_as_float(v); }
GM_DEVICE uint64_t bits_of(double v) { return uint64_t(__double_as_longlong(v)); }
GM_DEVICE double double_of(uint64_t v) { return __longlong_as_double((long long)(v)); }

}  // namespace gm
