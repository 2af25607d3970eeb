// mma.sync of a warp, and conversions of its element types.
#pragma once
#include "ptx.cuh"

#ifdef __CUDACC__
namespace gm {

template <typename T>
struct Num;

// mma: d += a b for 16 x 16 x 8, a in four registers, b in b0 and b1.
#define GM_NUM(T, TYPE, FROM_FLOAT, TO_FLOAT)                                                      \
  template <>                                                                                      \
  struct Num<T> {                                                                                  \
    static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, \
                                               uint32_t b1) {                                      \
      asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                                   \
          ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                   \
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                         \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                         \
    }                                                                                              \
    static __device__ __forceinline__ T round(float v) { return FROM_FLOAT(v); }                   \
    static __device__ __forceinline__ float to_float(T v) { return TO_FLOAT(v); }                  \
  };
GM_NUM(__nv_bfloat16, "bf16", __float2bfloat16_rn, __bfloat162float)
GM_NUM(__half, "f16", __float2half_rn, __half2float)
#undef GM_NUM

}  // namespace gm
#endif
