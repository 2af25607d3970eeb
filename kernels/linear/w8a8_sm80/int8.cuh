// int8 codes of W, offset by 128 as checkpoints have them, and of x: operands of product.cuh.
#pragma once
#include "product.cuh"

#ifdef __CUDACC__
#include "sm80/mma_int8.cuh"

namespace gm::w8a8 {

struct Int8 {
  using Sum = int32_t;
  using Four = int4;
  static constexpr bool kAsync = true, kTwoLevels = false, kBlocks = false;  // sums are exact
  // Flipping the upper bit of a code makes it signed.
  __device__ __forceinline__ static uint32_t weight(uint32_t codes) { return codes ^ 0x80808080u; }
  __device__ __forceinline__ static void mma(Sum (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_s8(d, a, b0, b1);
  }
};

}  // namespace gm::w8a8
#endif
