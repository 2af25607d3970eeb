// Stores of boxes of three dimensions by TMA, which tma.cuh has for two.
#pragma once
#include "tma.cuh"

#ifdef __CUDACC__
namespace gm {

// A box of a tensor from shared memory; x counts elements of the innermost dimension.
__device__ __forceinline__ void tma_store(const void* map, uint32_t src, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(map),
      "r"(x), "r"(y), "r"(z), "r"(src)
      : "memory");
}

}  // namespace gm
#endif
