// mma.sync of a warp on bytes, in the instructions of Turing.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
namespace gm {

// d += a b for 8 x 16 by 16 x 8, of four signed bytes in a register. Sums are exact.
__device__ __forceinline__ void mma_m8n8k16(int32_t& d0, int32_t& d1, uint32_t a, uint32_t b) {
  asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
      : "+r"(d0), "+r"(d1)
      : "r"(a), "r"(b));
}

}  // namespace gm
#endif
