// mbarriers in shared memory, by their 32-bit addresses.
#pragma once
#include "ptx.cuh"

#ifdef __CUDACC__
namespace gm {

// Lanes of a warp that arrive once the warp is done with a slot. compute-sanitizer's racecheck sees no order
// between one lane's arrival and the reads of the others, so it is given a build with GM_RACECHECK.
#ifdef GM_RACECHECK
constexpr int kArrivingLanes = 32;
#else
constexpr int kArrivingLanes = 1;
#endif

__device__ __forceinline__ void mbar_init(uint32_t bar, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
// Makes initialized barriers visible to the async proxy and to the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbar_arrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
// Arrives at the barrier of CTA `rank` of the cluster that is at `bar` in this one. For reads by wgmma that have been waited
// for: it orders no others, since with the scope of a cluster it would wait for all memory of the GPU.
__device__ __forceinline__ void mbar_arrive_at_rank(uint32_t bar, int rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mapa(bar, rank)) : "memory");
}
// Arrives, and lets the phase wait for `bytes` of TMA copies.
__device__ __forceinline__ void mbar_arrive_expect_tx(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
// Arrives once all cp.async of this thread so far have landed.
__device__ __forceinline__ void cp_async_mbar_arrive(uint32_t bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}
// Waits for the phase of this parity to complete.
__device__ __forceinline__ void mbar_wait(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nW: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra D;\nbra "
      "W;\nD:\n}" ::"r"(bar),
      "r"(parity)
      : "memory");
}

}  // namespace gm
#endif
