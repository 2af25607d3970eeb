// sm90/ptx.cuh and sm90/mma.cuh for sm_75 (Turing): to be included before any header that includes one of them.
//
// Most of their functions are instructions that Turing has: ldmatrix, loads and stores of shared memory. Those that it
// lacks (mma.sync of 16 k, cp.async, the conversion of two floats at once) get other names here, so that primitives.cuh
// can define the functions that schedules for sm_80 call in its instructions. Nothing calls the renamed ones.
#pragma once
#define Num NumOfSm80
#define cp_async_16 cp_async_16_of_sm80
#define cp_async_commit cp_async_commit_of_sm80
#define cp_async_wait cp_async_wait_of_sm80
#define packed packed_of_sm80
#include "sm90/mma.cuh"
#undef Num
#undef cp_async_16
#undef cp_async_commit
#undef cp_async_wait
#undef packed

#ifdef __CUDACC__
namespace gm {

// d += a b for 16 x 8 x 8 of fp16: a in a0 (rows 0 to 7) and a1 (8 to 15), b in one register.
__device__ __forceinline__ void mma_m16n8k8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b));
}

// 16 bytes that no kernel writes while this one runs.
__device__ __forceinline__ uint4 load_16(const void* from) { return __ldg(static_cast<const uint4*>(from)); }

}  // namespace gm
#endif
