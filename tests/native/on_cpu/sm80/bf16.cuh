// In the place of kernels/_native/sm80/bf16.cuh.
#pragma once

namespace gm {

inline uint32_t times_bf16(uint32_t a, uint32_t b) {
  return packed<Bf16>(Num<Bf16>::half(a, 0) * Num<Bf16>::half(b, 0),
                      Num<Bf16>::half(a, 1) * Num<Bf16>::half(b, 1));
}

}  // namespace gm
