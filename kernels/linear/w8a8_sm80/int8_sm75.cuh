// int8 codes as in int8.cuh, in the instructions of sm_75, which has no cp.async.
#pragma once
#include "product.cuh"

#ifdef __CUDACC__
#include "sm75/mma_int8.cuh"

namespace gm::w8a8 {

struct Int8OfTuring {
  using Sum = int32_t;
  using Four = int4;
  static constexpr bool kAsync = false, kTwoLevels = false, kBlocks = false;
  __device__ __forceinline__ static uint32_t weight(uint32_t codes) { return codes ^ 0x80808080u; }
  // In the registers of mma.m16n8k32: rows 0 to 7 and 8 to 15 of W, and k 0 to 15 and 16 to 31, are in registers of their own.
  __device__ __forceinline__ static void mma(Sum (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_m8n8k16(d[0], d[1], a[0], b0);
    mma_m8n8k16(d[2], d[3], a[1], b0);
    mma_m8n8k16(d[0], d[1], a[2], b1);
    mma_m8n8k16(d[2], d[3], a[3], b1);
  }
};

}  // namespace gm::w8a8
#endif
