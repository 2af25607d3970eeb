// What the schedules for sm_80 (linear/frag16_sm80) call of sm90/ptx.cuh and sm90/mma.cuh, in instructions of sm_75: to be
// included before them. fp16 alone, as Turing's tensor cores have no bf16.
#pragma once
#include "sm75/ptx.cuh"

#ifdef __CUDACC__
namespace gm {

template <typename T>
struct Num;
template <>
struct Num<__half> {
  // d += a b for 16 x 8 x 16, as sm_80 has it in one instruction: k 0 to 7 are in a[0], a[1] and b0, the others behind.
  static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
    mma_m16n8k8(d, a[0], a[1], b0);
    mma_m16n8k8(d, a[2], a[3], b1);
  }
  static __device__ __forceinline__ __half round(float v) { return __float2half_rn(v); }
  static __device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
};

// Two floats rounded to a pair of T, `low` in the low half.
template <typename T>
__device__ __forceinline__ uint32_t packed(float low, float high);
template <>
__device__ __forceinline__ uint32_t packed<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

template <>
__device__ __forceinline__ uint32_t packed<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// The first `bytes` of 16 at an address that is a multiple of 16, and zeros; of none, nothing is read. Where it is some of
// them, all are read, as no page ends between, and those past the end are masked.
__device__ __forceinline__ uint4 load_16(const void* from, int bytes) {
  if (bytes >= 16) return load_16(from);
  if (bytes <= 0) return make_uint4(0, 0, 0, 0);
  const uint4 v = load_16(from);
  const auto kept = [&](uint32_t word, int at) {
    return bytes >= at + 4 ? word : bytes >= at + 2 ? word & 0xffffu : 0u;
  };
  return make_uint4(kept(v.x, 0), kept(v.y, 4), kept(v.z, 8), kept(v.w, 12));
}

// A copy that is made at once: it has landed when the threads that read it have passed their next barrier, so that two
// slots suffice.
__device__ __forceinline__ void cp_async_16(uint32_t to, const void* from, int bytes = 16) {
  st_shared(to, load_16(from, bytes));
}
__device__ __forceinline__ void cp_async_commit() {}
template <int>
__device__ __forceinline__ void cp_async_wait() {}

}  // namespace gm
#endif
