// Instructions of product.cuh that kernels/_native/sm90 has no function for.
#pragma once

#ifdef __CUDACC__
#include "sm90/ptx.cuh"

namespace gm::dense {

// A store of 16 bytes. As PTX: the compiler would split an assignment under a condition into four stores.
__device__ __forceinline__ void store_16(void* to, uint4 words) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.x), "r"(words.y), "r"(words.z),
               "r"(words.w)
               : "memory");
}

// A box of a tensor to the same place in each of the first RANKS CTAs of the cluster, whose barriers all count its bytes.
template <int RANKS>
__device__ __forceinline__ void tma_load_to_all(uint32_t dst, const void* map, int x, int y, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(dst),
      "l"(map), "r"(x), "r"(y), "r"(bar), "h"(static_cast<uint16_t>((1 << RANKS) - 1))
      : "memory");
}

// Arrives at the barrier of CTA `rank` that is at `bar` in this one. What it orders are reads by wgmma, which have been
// waited for.
__device__ __forceinline__ void mbar_arrive_at_rank(uint32_t bar, int rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mapa(bar, rank)) : "memory");
}

}  // namespace gm::dense
#endif
