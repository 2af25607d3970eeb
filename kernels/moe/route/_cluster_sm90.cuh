// What _order.cuh asks of a cluster beside grouped_topk/_warp.cuh; tests/native/route_fibers.cpp has it for a CPU.
#pragma once
#include "moe/grouped_topk/_warp.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/ptx.cuh"

namespace gm {

GM_DEVICE int thread() { return int(threadIdx.x); }
GM_DEVICE void block_sync() { __syncthreads(); }
GM_DEVICE uint32_t shuffle_up(uint32_t v, int by) { return __shfl_up_sync(kAll, v, by); }
GM_DEVICE uint32_t warp_sum(uint32_t v) { return __reduce_add_sync(kAll, v); }
GM_DEVICE int popcount(uint32_t v) { return __popc(v); }

// From here on the inputs are read. The next kernel may begin, which may read them without waiting.
GM_DEVICE void begin() { griddepcontrol_wait(), griddepcontrol_launch_dependents(); }

// Prepares an mbarrier for so many bytes.
GM_DEVICE void expect_bytes(uint64_t* barrier, int bytes) {
  mbar_init(smem_u32(barrier), 1);
  fence_mbarrier_init();
  mbar_arrive_expect_tx(smem_u32(barrier), bytes);
}
GM_DEVICE void wait_for_bytes(uint64_t* barrier) { mbar_wait(smem_u32(barrier), 0); }

// Sets bits of a word of CTA `rank` of the cluster, and counts its four bytes there. `word` and `barrier` are where this CTA has them.
GM_DEVICE void set_bits(uint32_t* word, int rank, uint32_t bits, uint64_t* barrier) {
  asm volatile(
      "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.or.b32 [%0], %1, [%2];" ::"r"(
          mapa(smem_u32(word), rank)),
      "r"(bits), "r"(mapa(smem_u32(barrier), rank))
      : "memory");
}

}  // namespace gm
