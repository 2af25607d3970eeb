// Arithmetic on pairs of bf16 of sm_80, by the instruction that it has for it.
#pragma once
#ifdef __CUDACC__
#include <cstdint>

namespace gm {

// The products of two pairs, rounded once. Subnormal numbers count.
__device__ __forceinline__ uint32_t times_bf16(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000u));  // + -0
  return r;
}

}  // namespace gm
#endif
