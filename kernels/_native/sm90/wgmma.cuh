// wgmma.mma_async of a warpgroup: D[64, N] = A[64, K] B[K, N] (+ D), float32 or int32 sums in registers.
//
//   Wgmma<T, N>::ss(d, a, b, scale_d)   A and B in shared memory, by descriptors
//   Wgmma<T, N>::rs(d, a, b, scale_d)   A in registers (16-bit types)
//
// T: __nv_bfloat16, __half (K = 16), E4m3, U8S8, S8U8 (K = 32). scale_d: 0 overwrites D, 1 adds to it. A in
// shared memory is K-major. B is K-major, or, with ss<kMajorMN> and rs<kMajorMN> of 16-bit types, MN-major:
// its N elements in a row.
#pragma once
#include "ptx.cuh"

#ifdef __CUDACC__
namespace gm {

enum Major : int { kMajorK, kMajorMN };

struct E4m3 {  // float sums, of about 14 bits inside a product
  using Sum = float;
};
struct U8S8 {  // A unsigned, B signed
  using Sum = int32_t;
};
struct S8U8 {  // A signed, B unsigned
  using Sum = int32_t;
};

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Keeps the compiler from moving uses of the accumulators across this point.
template <int N>
__device__ __forceinline__ void wgmma_fence_operand(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int N>
__device__ __forceinline__ void wgmma_fence_operand(int32_t (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// Matrix descriptor of rows of 128 bytes in the 128-byte swizzle. stride: bytes from eight rows to the next
// eight; leading: bytes from 64 16-bit elements of a row to the next 64, which only MN-major operands use.
__device__ __forceinline__ uint64_t swizzle128_descriptor(uint32_t address, uint32_t stride = 1024,
                                                          uint32_t leading = 16) {
  return (static_cast<uint64_t>(1) << 62) | (static_cast<uint64_t>(stride >> 4) << 32) |
         (static_cast<uint64_t>(leading >> 4) << 16) | ((address & 0x3ffff) >> 4);
}

template <typename T, int N>
struct Wgmma;

// A number of accumulators as operands: their places, and their registers from d[i] on, each by R.
#define GM_D4 "%0, %1, %2, %3"
#define GM_D8 GM_D4 ", %4, %5, %6, %7"
#define GM_D16 GM_D8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define GM_D32 GM_D16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define GM_D40 GM_D32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define GM_D48 GM_D40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define GM_D64 GM_D48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define GM_D80 GM_D64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define GM_D96 GM_D80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define GM_D112 \
  GM_D96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define GM_D128 \
  GM_D112 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define GM_R4(R, i) R(d[i]), R(d[i + 1]), R(d[i + 2]), R(d[i + 3])
#define GM_R8(R, i) GM_R4(R, i), GM_R4(R, i + 4)
#define GM_R16(R, i) GM_R8(R, i), GM_R8(R, i + 8)
#define GM_R32(R, i) GM_R16(R, i), GM_R16(R, i + 16)
#define GM_R40(R, i) GM_R32(R, i), GM_R8(R, i + 32)
#define GM_R48(R, i) GM_R32(R, i), GM_R16(R, i + 32)
#define GM_R64(R, i) GM_R32(R, i), GM_R32(R, i + 32)
#define GM_R80(R, i) GM_R64(R, i), GM_R16(R, i + 64)
#define GM_R96(R, i) GM_R64(R, i), GM_R32(R, i + 64)
#define GM_R112(R, i) GM_R96(R, i), GM_R16(R, i + 96)
#define GM_R128(R, i) GM_R64(R, i), GM_R64(R, i + 64)
#define GM_FLOAT "+f"
#define GM_INT "+r"

// H: N / 2; P0 .. P6: the operands that follow the accumulators.
#define GM_WGMMA_16(T, TYPE, N, H, P0, P1, P2, P3, P4, P5, P6)                                          \
  template <>                                                                                           \
  struct Wgmma<T, N> {                                                                                  \
    template <Major B = kMajorK>                                                                        \
    static __device__ __forceinline__ void ss(float (&d)[N / 2], uint64_t a, uint64_t b, int scale_d) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N  \
                   "k16.f32." TYPE "." TYPE " {" GM_D##H "}, " P0 ", " P1 ", p, 1, 1, 0, " P3 ";\n}"    \
                   : GM_R##H(GM_FLOAT, 0)                                                               \
                   : "l"(a), "l"(b), "r"(scale_d), "n"(static_cast<int>(B)));                           \
    }                                                                                                   \
    template <Major B = kMajorK>                                                                        \
    static __device__ __forceinline__ void rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b,    \
                                              int scale_d) {                                            \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N  \
                   "k16.f32." TYPE "." TYPE " {" GM_D##H "}, {" P0 ", " P1 ", " P2 ", " P3 "}, " P4     \
                                                         ", p, 1, 1, " P6 ";\n}"                        \
                   : GM_R##H(GM_FLOAT, 0)                                                               \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(scale_d),                  \
                     "n"(static_cast<int>(B)));                                                         \
    }                                                                                                   \
  };
#define GM_WGMMA_8(T, TYPES, NEGATE, N, H, REGISTER, P0, P1, P2)                                         \
  template <>                                                                                            \
  struct Wgmma<T, N> {                                                                                   \
    static __device__ __forceinline__ void ss(T::Sum (&d)[N / 2], uint64_t a, uint64_t b, int scale_d) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N   \
                   "k32." TYPES " {" GM_D##H "}, " P0 ", " P1 ", p" NEGATE ";\n}"                        \
                   : GM_R##H(REGISTER, 0)                                                                \
                   : "l"(a), "l"(b), "r"(scale_d));                                                      \
    }                                                                                                    \
  };
#define GM_WGMMAS_16(T, TYPE)                                                            \
  GM_WGMMA_16(T, TYPE, 8, 4, "%4", "%5", "%6", "%7", "%8", "%9", "%10")                  \
  GM_WGMMA_16(T, TYPE, 16, 8, "%8", "%9", "%10", "%11", "%12", "%13", "%14")             \
  GM_WGMMA_16(T, TYPE, 32, 16, "%16", "%17", "%18", "%19", "%20", "%21", "%22")          \
  GM_WGMMA_16(T, TYPE, 64, 32, "%32", "%33", "%34", "%35", "%36", "%37", "%38")          \
  GM_WGMMA_16(T, TYPE, 80, 40, "%40", "%41", "%42", "%43", "%44", "%45", "%46")          \
  GM_WGMMA_16(T, TYPE, 96, 48, "%48", "%49", "%50", "%51", "%52", "%53", "%54")          \
  GM_WGMMA_16(T, TYPE, 128, 64, "%64", "%65", "%66", "%67", "%68", "%69", "%70")         \
  GM_WGMMA_16(T, TYPE, 160, 80, "%80", "%81", "%82", "%83", "%84", "%85", "%86")         \
  GM_WGMMA_16(T, TYPE, 192, 96, "%96", "%97", "%98", "%99", "%100", "%101", "%102")      \
  GM_WGMMA_16(T, TYPE, 224, 112, "%112", "%113", "%114", "%115", "%116", "%117", "%118") \
  GM_WGMMA_16(T, TYPE, 256, 128, "%128", "%129", "%130", "%131", "%132", "%133", "%134")
#define GM_WGMMAS_8(T, TYPES, NEGATE, REGISTER)                       \
  GM_WGMMA_8(T, TYPES, NEGATE, 8, 4, REGISTER, "%4", "%5", "%6")      \
  GM_WGMMA_8(T, TYPES, NEGATE, 16, 8, REGISTER, "%8", "%9", "%10")    \
  GM_WGMMA_8(T, TYPES, NEGATE, 32, 16, REGISTER, "%16", "%17", "%18") \
  GM_WGMMA_8(T, TYPES, NEGATE, 64, 32, REGISTER, "%32", "%33", "%34") \
  GM_WGMMA_8(T, TYPES, NEGATE, 96, 48, REGISTER, "%48", "%49", "%50") \
  GM_WGMMA_8(T, TYPES, NEGATE, 128, 64, REGISTER, "%64", "%65", "%66")

GM_WGMMAS_16(__nv_bfloat16, "bf16")
GM_WGMMAS_16(__half, "f16")
GM_WGMMAS_8(E4m3, "f32.e4m3.e4m3", ", 1, 1", GM_FLOAT)
GM_WGMMAS_8(U8S8, "s32.u8.s8", "", GM_INT)
GM_WGMMAS_8(S8U8, "s32.s8.u8", "", GM_INT)

#undef GM_D4
#undef GM_D8
#undef GM_D16
#undef GM_D32
#undef GM_D40
#undef GM_D48
#undef GM_D64
#undef GM_D80
#undef GM_D96
#undef GM_D112
#undef GM_D128
#undef GM_R4
#undef GM_R8
#undef GM_R16
#undef GM_R32
#undef GM_R40
#undef GM_R48
#undef GM_R64
#undef GM_R80
#undef GM_R96
#undef GM_R112
#undef GM_R128
#undef GM_FLOAT
#undef GM_INT
#undef GM_WGMMA_16
#undef GM_WGMMA_8
#undef GM_WGMMAS_16
#undef GM_WGMMAS_8

}  // namespace gm
#endif
