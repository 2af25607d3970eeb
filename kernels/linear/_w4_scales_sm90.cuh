// Decoding int4 with a scale into the A operand of wgmma.
#pragma once
#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace gm {

__device__ __forceinline__ uint32_t pair_mul(uint32_t a, uint32_t b, __nv_bfloat16) {
  uint32_t out;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
__device__ __forceinline__ uint32_t pair_mul(uint32_t a, uint32_t b, __half) {
  uint32_t out;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
__device__ __forceinline__ uint32_t pair_fma(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t out;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}
__device__ __forceinline__ uint32_t pair_sub(uint32_t a, uint32_t b) {
  uint32_t out;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

// (code - 8) x scale, rounded once to T, for rows g and g + 8 of a tile: the A operand of a product, from the word of a lane. What it
// gives is smaller by kFactor.
//
// bf16: the low eight bits of a bf16 are an integer x 2^-133, subnormal or not. So codes at bits 0 and 4 of a half are numbers as they lie,
// c x 2^-133 and c x 2^-129, and one multiply-add subtracts the 8, scales, and rounds once. 2^-32 keeps the factors in range.
// WIDE: fp16 scales, held as the sum of two bf16 (11 bits are 8 and 3, and a code times 3 bits is exact).
template <typename T, bool WIDE>
struct Scales {
  static constexpr float kFactor = 4294967296.f;  // 2^32
  static constexpr uint32_t kTimes = 0x70007200u, kMinus = 0xB100B100u;  // (2^97, 2^101); -8 x 2^-32
  uint32_t high[2], low[2];
  __device__ __forceinline__ Scales(uint32_t raw, bool) {
    uint32_t first = raw, second;
    if constexpr (WIDE) {
      const float2 s = __half22float2(*reinterpret_cast<const __half2*>(&raw));
      const __nv_bfloat162 h = __floats2bfloat162_rn(s.x, s.y);
      const __nv_bfloat162 l = __floats2bfloat162_rn(s.x - __low2float(h), s.y - __high2float(h));
      first = *reinterpret_cast<const uint32_t*>(&h), second = *reinterpret_cast<const uint32_t*>(&l);
    } else {
      first = pair_mul(raw, kTimes, T()), second = pair_mul(raw, kMinus, T());
    }
    high[0] = __byte_perm(first, 0, 0x1010), high[1] = __byte_perm(first, 0, 0x3232);
    low[0] = __byte_perm(second, 0, 0x1010), low[1] = __byte_perm(second, 0, 0x3232);
  }
  __device__ __forceinline__ uint32_t one(uint32_t code, int row) const {
    if constexpr (!WIDE) return pair_fma(code, high[row], low[row]);
    const uint32_t u = pair_fma(code, row == 0 ? 0x72007200u : 0x70007000u, kMinus);
    return pair_fma(u, high[row], pair_mul(u, low[row], T()));
  }
  __device__ __forceinline__ void decode(uint32_t word, uint32_t (&a)[4]) const {
    const uint32_t next = word >> 8;
    a[0] = one(word & 0x000f000fu, 0), a[1] = one(word & 0x00f000f0u, 1);
    a[2] = one(next & 0x000f000fu, 0), a[3] = one(next & 0x00f000f0u, 1);
  }
};

// fp16: codes at bits 0 and 4 under the exponent of 1024 are 1024 + c and 1024 + 16 c.
template <>
struct Scales<__half, false> {
  static constexpr float kFactor = 1.f;
  uint32_t scale[2];
  __device__ __forceinline__ Scales(uint32_t raw, bool half) {
    if (!half) {  // bf16 scales
      const __half2 h = __floats2half2_rn(__uint_as_float(raw << 16), __uint_as_float(raw & 0xffff0000u));
      raw = *reinterpret_cast<const uint32_t*>(&h);
    }
    scale[0] = __byte_perm(raw, 0, 0x1010), scale[1] = __byte_perm(raw, 0, 0x3232);
  }
  template <uint32_t MASK>
  static __device__ __forceinline__ uint32_t number(uint32_t word) {
    uint32_t out;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(out) : "r"(word), "n"(MASK), "r"(0x64006400u));
    return out;
  }
  static __device__ __forceinline__ uint32_t sixteenth(uint32_t pair) {  // (1024 + 16 c) / 16 - 72
    uint32_t out;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(pair), "r"(0x2C002C00u), "r"(0xD480D480u));
    return out;
  }
  __device__ __forceinline__ void decode(uint32_t word, uint32_t (&a)[4]) const {
    const uint32_t next = word >> 8;
    a[0] = pair_mul(pair_sub(number<0x000f000fu>(word), 0x64086408u), scale[0], __half());
    a[1] = pair_mul(sixteenth(number<0x00f000f0u>(word)), scale[1], __half());
    a[2] = pair_mul(pair_sub(number<0x000f000fu>(next), 0x64086408u), scale[0], __half());
    a[3] = pair_mul(sixteenth(number<0x00f000f0u>(next)), scale[1], __half());
  }
};

}  // namespace gm
#endif
