// Wgmma<T, N>::rs of wgmma.cuh for N = 80, 96, 160, 192 and 224: tiles for numbers of rows between powers of two. In a
// file of its own, since a change of wgmma.cuh compiles all of Hopper's kernels again.
#pragma once
#include "sm90/wgmma.cuh"

#ifdef __CUDACC__
namespace gm {

#define GM_D64                                                                                             \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "   \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"                                                       \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, " \
  "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define GM_D40                                                                                           \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39"
#define GM_D48 GM_D40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define GM_D80 GM_D64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define GM_D96 GM_D80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define GM_D112 \
  GM_D96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define GM_R4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define GM_R16(i) GM_R4(i), GM_R4(i + 4), GM_R4(i + 8), GM_R4(i + 12)
#define GM_R40 GM_R16(0), GM_R16(16), GM_R4(32), GM_R4(36)
#define GM_R48 GM_R16(0), GM_R16(16), GM_R16(32)
#define GM_R80 GM_R48, GM_R16(48), GM_R16(64)
#define GM_R96 GM_R80, GM_R16(80)
#define GM_R112 GM_R96, GM_R16(96)

// D, R: the accumulators; A0 .. A3, B, ADD: the operands that follow them.
#define GM_WGMMA_ROWS(T, TYPE, N, D, R, A0, A1, A2, A3, B, ADD)                                         \
  template <>                                                                                           \
  struct Wgmma<T, N> {                                                                                  \
    static __device__ __forceinline__ void rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b,    \
                                              int scale_d) {                                            \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADD ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N \
                   "k16.f32." TYPE "." TYPE " {" D "}, {" A0 ", " A1 ", " A2 ", " A3 "}, " B            \
                   ", p, 1, 1, 0;\n}"                                                                   \
                   : R                                                                                  \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(scale_d));                 \
    }                                                                                                   \
  };
#define GM_WGMMAS_ROWS(T, TYPE)                                                           \
  GM_WGMMA_ROWS(T, TYPE, 80, GM_D40, GM_R40, "%40", "%41", "%42", "%43", "%44", "%45")    \
  GM_WGMMA_ROWS(T, TYPE, 96, GM_D48, GM_R48, "%48", "%49", "%50", "%51", "%52", "%53")    \
  GM_WGMMA_ROWS(T, TYPE, 160, GM_D80, GM_R80, "%80", "%81", "%82", "%83", "%84", "%85")   \
  GM_WGMMA_ROWS(T, TYPE, 192, GM_D96, GM_R96, "%96", "%97", "%98", "%99", "%100", "%101") \
  GM_WGMMA_ROWS(T, TYPE, 224, GM_D112, GM_R112, "%112", "%113", "%114", "%115", "%116", "%117")

GM_WGMMAS_ROWS(__nv_bfloat16, "bf16")
GM_WGMMAS_ROWS(__half, "f16")

#undef GM_WGMMAS_ROWS
#undef GM_WGMMA_ROWS
#undef GM_D40
#undef GM_D48
#undef GM_D64
#undef GM_D80
#undef GM_D96
#undef GM_D112
#undef GM_R4
#undef GM_R16
#undef GM_R40
#undef GM_R48
#undef GM_R80
#undef GM_R96
#undef GM_R112

}  // namespace gm
#endif
