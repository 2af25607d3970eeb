// E2M1 codes of f4_frag16_v1 as pairs of 16-bit floats.
//
// A code is s e1 e0 m. At bits 15 and 8, 7, 6 of a bf16 (15 and 11, 10, 9 of an fp16) it is the value times 2^-126
// (2^-14), the subnormal 0.5 included. The layout permutes the 32 bits of a word so that three of its four pairs need
// one rotation and one mask, and the fourth two: 7 logic operations per word, as many as for 4-bit integers, instead of
// 10 to 12 with contiguous codes.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace gm {

template <typename T>
__device__ __forceinline__ void fp4_pairs(uint32_t w, uint32_t (&a)[4]);

template <>
__device__ __forceinline__ void fp4_pairs<__nv_bfloat16>(uint32_t w, uint32_t (&a)[4]) {
  constexpr uint32_t all = 0x81C081C0u, high = 0x81808180u, low = 0x00400040u;
  a[0] = w & all;
  a[1] = (w << 4) & all;
  a[2] = __funnelshift_l(w, w, 10) & all;
  a[3] = (__funnelshift_l(w, w, 14) & high) | ((w << 6) & low);
}

template <>
__device__ __forceinline__ void fp4_pairs<__half>(uint32_t w, uint32_t (&a)[4]) {
  constexpr uint32_t sign = 0x80008000u, rest = 0x0E000E00u, top = 0x0C000C00u, low = 0x02000200u;
  a[0] = (w & sign) | ((w << 3) & rest);
  a[1] = ((w << 4) & sign) | ((w << 7) & rest);
  a[2] = ((w << 10) & sign) | (__funnelshift_l(w, w, 13) & rest);
  a[3] = ((w << 14) & sign) | (__funnelshift_l(w, w, 17) & top) | ((w << 9) & low);
}

// a times the low (HALF = 0) or high half of b, rounded once; exact in all uses here.
template <typename T, int HALF>
__device__ __forceinline__ uint32_t times_half(uint32_t a, uint32_t b);
template <>
__device__ __forceinline__ uint32_t times_half<__nv_bfloat16, 0>(uint32_t a, uint32_t b) {
  const auto v = __hmul2(reinterpret_cast<const __nv_bfloat162&>(a),
                         __low2bfloat162(reinterpret_cast<const __nv_bfloat162&>(b)));
  return reinterpret_cast<const uint32_t&>(v);
}
template <>
__device__ __forceinline__ uint32_t times_half<__nv_bfloat16, 1>(uint32_t a, uint32_t b) {
  const auto v = __hmul2(reinterpret_cast<const __nv_bfloat162&>(a),
                         __high2bfloat162(reinterpret_cast<const __nv_bfloat162&>(b)));
  return reinterpret_cast<const uint32_t&>(v);
}
template <>
__device__ __forceinline__ uint32_t times_half<__half, 0>(uint32_t a, uint32_t b) {
  const auto v =
      __hmul2(reinterpret_cast<const __half2&>(a), __low2half2(reinterpret_cast<const __half2&>(b)));
  return reinterpret_cast<const uint32_t&>(v);
}
template <>
__device__ __forceinline__ uint32_t times_half<__half, 1>(uint32_t a, uint32_t b) {
  const auto v =
      __hmul2(reinterpret_cast<const __half2&>(a), __high2half2(reinterpret_cast<const __half2&>(b)));
  return reinterpret_cast<const uint32_t&>(v);
}

// Block scales of two rows (low half: row g, high half: row g + 8) as factors for the pairs above. NVFP4:
// bytes 0 and 2 (odd = 0) or 1 and 3 of the word are an exponent of five bits and a mantissa of three; the
// factor is the scale times 2^118 (2^6 for fp16), so that a product is the weight times 2^-8.
template <typename T>
__device__ __forceinline__ uint32_t nvfp4_factor(uint32_t word, int odd);
template <>
__device__ __forceinline__ uint32_t nvfp4_factor<__nv_bfloat16>(uint32_t word, int odd) {
  uint32_t top, out;  // two constants in one lop3: one of them in a register
  asm("mov.b32 %0, 0x70007000;" : "=r"(top));
  asm("lop3.b32 %0, %1, 0x0FF00FF0, %2, 0xEA;" : "=r"(out) : "r"(odd ? word >> 4 : word << 4), "r"(top));
  return out;
}
template <>
__device__ __forceinline__ uint32_t nvfp4_factor<__half>(uint32_t word, int odd) {
  return (odd ? word >> 1 : word << 7) & 0x7F807F80u;
}

// MXFP4: the bytes are 254 for the largest exponent of the row and less below; a product is the weight times
// 2, over the row's largest scale. For fp16 the word first goes through `mxfp4_bytes`; what is 2^-30 of the
// largest or less is 0 there.
template <typename T>
__device__ __forceinline__ uint32_t mxfp4_factor(uint32_t word, int odd);
template <>
__device__ __forceinline__ uint32_t mxfp4_factor<__nv_bfloat16>(uint32_t word, int odd) {
  return (odd ? word >> 1 : word << 7) & 0x7F807F80u;
}
template <>
__device__ __forceinline__ uint32_t mxfp4_factor<__half>(uint32_t word, int odd) {
  return (odd ? word << 2 : word << 10) & 0x7C007C00u;
}
template <typename T>
__device__ __forceinline__ uint32_t mxfp4_bytes(uint32_t word) {
  return word;
}
template <>
__device__ __forceinline__ uint32_t mxfp4_bytes<__half>(uint32_t word) {
  return __vsubus4(word, 0xE0E0E0E0u);
}

}  // namespace gm
#endif
