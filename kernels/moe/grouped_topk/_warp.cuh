// What _rows.cuh asks of a warp and of the processor; tests/native/grouped_topk_fibers.h has it for a CPU.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#define GM_DEVICE __device__ __forceinline__

namespace gm {

constexpr unsigned kAll = 0xffffffffu;

GM_DEVICE int lane() { return int(threadIdx.x & 31); }
GM_DEVICE int warp() { return int(threadIdx.x >> 5); }
GM_DEVICE int64_t first_row(int warps) { return int64_t(blockIdx.x) * warps; }

// The same value, which the compiler then keeps in a register.
GM_DEVICE int in_register(int v) {
  asm volatile("" : "+r"(v));
  return v;
}

GM_DEVICE void warp_sync() { __syncwarp(); }
GM_DEVICE uint32_t ballot(bool v) { return __ballot_sync(kAll, v); }
GM_DEVICE uint32_t shuffle(uint32_t v, int from) { return __shfl_sync(kAll, v, from); }
GM_DEVICE uint32_t shuffle_xor(uint32_t v, int mask) { return __shfl_xor_sync(kAll, v, mask); }
GM_DEVICE uint32_t warp_max(uint32_t v) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kAll, v);
#else
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) v = max(v, __shfl_xor_sync(kAll, v, mask));
  return v;
#endif
}

GM_DEVICE uint32_t bits_of(float v) { return __float_as_uint(v); }
GM_DEVICE float float_of(uint32_t v) { return __uint_as_float(v); }
GM_DEVICE float exponential(float v) { return expf(v); }
GM_DEVICE float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
GM_DEVICE float quotient(float a, float b) { return __fdiv_rn(a, b); }
// 1 / v within a unit in the last place, for v from 1 to 2^125.
GM_DEVICE float reciprocal_approx(float v) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
GM_DEVICE float larger(float a, float b) { return fmaxf(a, b); }  // the other one of a NaN

GM_DEVICE float load_one(const float* from) { return __ldcg(from); }
GM_DEVICE float load_one(const __half* from) { return __half2float(__ldcg(from)); }
GM_DEVICE float load_one(const __nv_bfloat16* from) { return __bfloat162float(__ldcg(from)); }
// N neighbours in one load, of 16 bytes or of 8.
template <int N>
GM_DEVICE void load(float (&v)[N], const float* from) {
  static_assert(N == 4);
  const float4 four = __ldcg(reinterpret_cast<const float4*>(from));
  v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
}
GM_DEVICE float2 pair_of(uint32_t word, const __half*) {
  return __half22float2(reinterpret_cast<const __half2&>(word));
}
GM_DEVICE float2 pair_of(uint32_t word, const __nv_bfloat16*) {
  return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}
template <int N, typename T>
GM_DEVICE void load(float (&v)[N], const T* from) {
  static_assert(N == 4 || N == 8);
  uint32_t words[N / 2];
  if constexpr (N == 8) {
    const uint4 four = __ldcg(reinterpret_cast<const uint4*>(from));
    words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
  } else {
    const uint2 two = __ldcg(reinterpret_cast<const uint2*>(from));
    words[0] = two.x, words[1] = two.y;
  }
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    const float2 pair = pair_of(words[i], from);
    v[2 * i] = pair.x, v[2 * i + 1] = pair.y;
  }
}
// Four neighbours in shared memory, at a multiple of 16 bytes.
GM_DEVICE void keep_four(float* to, float a, float b, float c, float d) {
  *reinterpret_cast<float4*>(to) = make_float4(a, b, c, d);
}

}  // namespace gm
