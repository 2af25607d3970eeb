// wgmma with the A operand in registers and B in shared memory (K-major, 128-byte swizzle): D[64, MT] +=
// A[64, 16] B[16, MT].
#pragma once
#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace gm {

template <typename T, int MT>
struct Product;

#define GM_D16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define GM_D32 GM_D16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define GM_D64                                                                                        \
  GM_D32                                                                                              \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, " \
  "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define GM_D128                                                                                       \
  GM_D64                                                                                              \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, " \
  "%83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, " \
  "%102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, "  \
  "%118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define GM_F8(i)                                                                              \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define GM_F16(i) GM_F8(i), GM_F8(i + 8)
#define GM_F32(i) GM_F16(i), GM_F16(i + 16)
#define GM_F64(i) GM_F32(i), GM_F32(i + 32)
#define GM_F128(i) GM_F64(i), GM_F64(i + 64)

// D, F: accumulators; A, B, P: the numbers of the operands that follow them.
#define GM_PRODUCT(T, TYPE, MT, D, F, A, B, P)                                                         \
  template <>                                                                                          \
  struct Product<T, MT> {                                                                              \
    static __device__ __forceinline__ void run(float (&d)[MT / 2], const uint32_t (&a)[4], uint64_t b, \
                                               int add) {                                              \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #MT \
                   "k16.f32." TYPE "." TYPE " {" D "}, {" A "}, " B ", p, 1, 1, 0;\n}"                 \
                   : F(0)                                                                              \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                    \
    }                                                                                                  \
  }
#define GM_PRODUCTS_32(T, TYPE) GM_PRODUCT(T, TYPE, 32, GM_D16, GM_F16, "%16, %17, %18, %19", "%20", "%21")
#define GM_PRODUCTS_64(T, TYPE) GM_PRODUCT(T, TYPE, 64, GM_D32, GM_F32, "%32, %33, %34, %35", "%36", "%37")
#define GM_PRODUCTS_128(T, TYPE) GM_PRODUCT(T, TYPE, 128, GM_D64, GM_F64, "%64, %65, %66, %67", "%68", "%69")
#define GM_PRODUCTS_256(T, TYPE) \
  GM_PRODUCT(T, TYPE, 256, GM_D128, GM_F128, "%128, %129, %130, %131", "%132", "%133")
GM_PRODUCTS_32(__nv_bfloat16, "bf16");
GM_PRODUCTS_32(__half, "f16");
GM_PRODUCTS_64(__nv_bfloat16, "bf16");
GM_PRODUCTS_64(__half, "f16");
GM_PRODUCTS_128(__nv_bfloat16, "bf16");
GM_PRODUCTS_128(__half, "f16");
GM_PRODUCTS_256(__nv_bfloat16, "bf16");
GM_PRODUCTS_256(__half, "f16");

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// The matrix descriptor of rows of 128 bytes with the 128-byte swizzle,
// 1024 bytes from eight rows to the next.
__device__ __forceinline__ uint64_t swizzled_rows(uint32_t address) {
  return (static_cast<uint64_t>(1) << 62) | (static_cast<uint64_t>(1024 >> 4) << 32) |
         (static_cast<uint64_t>(1) << 16) | ((address & 0x3ffff) >> 4);
}

}  // namespace gm
#endif
