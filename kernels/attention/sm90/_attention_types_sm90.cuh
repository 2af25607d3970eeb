// Named barriers, and types of the output and of the queries, of attention on Hopper.
#pragma once
#include "sm90/ptx.cuh"

namespace gm {

// kBarOrder: order of the warpgroups' matrix products; kBarGroup: of a warpgroup; each is the first of two, by
// consumer warpgroup. kBarBoth: of both; kBarCopying: of the producer warpgroup.
enum : int { kBarOrder = 1, kBarGroup = 3, kBarBoth = 5, kBarCopying = 6 };

}  // namespace gm

#ifdef __CUDACC__
#include <type_traits>

namespace gm {

__device__ __forceinline__ int cdiv(int a, int b) { return (a + b - 1) / b; }

// fp16 or bf16, by p.bf16: the dtype of the output is known only at run time.
struct RuntimeHalf {};
template <typename T, typename P>
__device__ __forceinline__ uint32_t packed_as(const P& p, float low, float high) {
  if constexpr (std::is_same_v<T, RuntimeHalf>)
    return p.bf16 ? packed<__nv_bfloat16>(low, high) : packed<__half>(low, high);
  else
    return packed<T>(low, high);
}
template <typename T>
struct Stored {
  using type = T;
};
template <>
struct Stored<RuntimeHalf> {
  using type = uint16_t;
};

// Two elements of q as float32.
__device__ __forceinline__ float2 unpacked(uint32_t pair, bool bf16) {
  return bf16 ? make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u))
              : __half22float2(*reinterpret_cast<const __half2*>(&pair));
}
// Scale of a row of queries before its conversion to fp16: a power of two that brings its largest element to
// 2^14 .. 2^15 (within float32's range of exponents), so that bf16's range is kept where it matters.
struct RowScale {
  float factor, inverse;
  explicit __device__ __forceinline__ RowScale(float largest) {
    const int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 127;
    const uint32_t field = static_cast<uint32_t>(min(127 + 14 - exponent, 253));
    factor = __uint_as_float(field << 23), inverse = __uint_as_float((254 - field) << 23);
  }
};

}  // namespace gm
#endif
