// e4m3 codes to fp16 by shifts and masks: the conversion instruction begins with sm_89.
#pragma once
#include "sm90/ptx.cuh"

#ifdef __CUDACC__
namespace gm {

// Two codes, in the high bytes of both halves, as fp16. Both types have a sign, an exponent and a fraction, and the fields of a code are
// moved to where fp16 has them; the biases differ by 8, so that 2^8 times the result is the value, also of subnormal codes. 0x7f and 0xff,
// the codes of NaN, would become 480: carrying their field by one sets bit 14, which makes them NaN, and sets it for no other code.
__device__ __forceinline__ uint32_t e4m3_pair(uint32_t high_bytes) {
  const uint32_t fields = high_bytes >> 1 & 0x3f803f80u, nan = fields + 0x00800080u & 0x40004000u,
                 bits = fields | nan | (high_bytes & 0x80008000u), by = 0x5c005c00u;  // 2^8 twice
  const __half2 value =
      __hmul2(*reinterpret_cast<const __half2*>(&bits), *reinterpret_cast<const __half2*>(&by));
  return *reinterpret_cast<const uint32_t*>(&value);
}

// As e4m3_to_f16 of sm90/ptx.cuh.
__device__ __forceinline__ uint2 e4m3_by_bits(uint32_t codes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  return e4m3_to_f16(codes);
#else
  return make_uint2(e4m3_pair(__byte_perm(codes, 0, 0x1404)), e4m3_pair(__byte_perm(codes, 0, 0x3424)));
#endif
}

}  // namespace gm
#endif
