// e4m3 codes of W and of x: operands of product.cuh.
#pragma once
#include "product.cuh"

#ifdef __CUDACC__
#include "sm89/mma_fp8.cuh"

namespace gm::w8a8 {

// BLOCKS: a scale for 128 x 128 of W and for each 128 columns of a row of x, else one for a row of either.
template <bool BLOCKS>
struct E4m3 {
  using Sum = float;
  using Four = float4;
  static constexpr bool kAsync = true, kTwoLevels = true, kBlocks = BLOCKS;
  __device__ __forceinline__ static uint32_t weight(uint32_t codes) { return codes; }
  __device__ __forceinline__ static void mma(Sum (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_e4m3(d, a, b0, b1);
  }
};

}  // namespace gm::w8a8
#endif
