// wgmma with both operands in shared memory, K-major rows of 128 bytes in the 128-byte swizzle:
// D[64, N] += A[64, 32] B[32, N] of 8-bit values.
#pragma once
#include "linear/frag16_sm90/wgmma.cuh"
#ifdef __CUDACC__

namespace gm::w8a8 {

struct E4m3 {  // float sums, of about 14 bits inside a product
  using Sum = float;
  using Plain = E4m3;
};
struct Int8Plain {  // signed activations times unsigned weights
  using Sum = int32_t;
};
struct Int8 {  // unsigned weights times signed activations, exact sums
  using Sum = int32_t;
  using Plain = Int8Plain;
};

template <typename T, int MT>
struct Product;

#define GM_D4 "%0, %1, %2, %3"
#define GM_D8 GM_D4 ", %4, %5, %6, %7"
#define GM_F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define GM_I4(i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3])
#define GM_I8(i) GM_I4(i), GM_I4(i + 4)
#define GM_I16(i) GM_I8(i), GM_I8(i + 8)
#define GM_I32(i) GM_I16(i), GM_I16(i + 16)
#define GM_I64(i) GM_I32(i), GM_I32(i + 32)

// D, F: accumulators; A, B, P: the numbers of the operands that follow them.
#define GM_PRODUCT_8BIT(T, TYPES, SCALES, MT, D, F, A, B, P)                                           \
  template <>                                                                                          \
  struct Product<T, MT> {                                                                              \
    static __device__ __forceinline__ void run(T::Sum (&d)[MT / 2], uint64_t a, uint64_t b, int add) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #MT \
                   "k32." TYPES " {" D "}, " A ", " B ", p" SCALES ";\n}"                              \
                   : F(0)                                                                              \
                   : "l"(a), "l"(b), "r"(add));                                                        \
    }                                                                                                  \
  }
#define GM_PRODUCTS_8BIT(T, TYPES, SCALES, L)                                     \
  GM_PRODUCT_8BIT(T, TYPES, SCALES, 8, GM_D4, GM_##L##4, "%4", "%5", "%6");       \
  GM_PRODUCT_8BIT(T, TYPES, SCALES, 16, GM_D8, GM_##L##8, "%8", "%9", "%10");     \
  GM_PRODUCT_8BIT(T, TYPES, SCALES, 32, GM_D16, GM_##L##16, "%16", "%17", "%18"); \
  GM_PRODUCT_8BIT(T, TYPES, SCALES, 64, GM_D32, GM_##L##32, "%32", "%33", "%34"); \
  GM_PRODUCT_8BIT(T, TYPES, SCALES, 128, GM_D64, GM_##L##64, "%64", "%65", "%66")
GM_PRODUCTS_8BIT(E4m3, "f32.e4m3.e4m3", ", 1, 1", F);
GM_PRODUCTS_8BIT(Int8, "s32.u8.s8", "", I);
GM_PRODUCTS_8BIT(Int8Plain, "s32.s8.u8", "", I);

// Keeps uses of d behind whatever stands before this.
template <int N>
__device__ __forceinline__ void hold(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int N>
__device__ __forceinline__ void hold(int32_t (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

}  // namespace gm::w8a8
#endif
