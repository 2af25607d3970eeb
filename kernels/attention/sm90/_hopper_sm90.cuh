// Hopper's instructions as attention uses them: mbarriers, the tensor copy engine, wgmma over 128-byte
// swizzled tiles with the A operand in shared memory (scores) or in registers (probabilities times values).
#pragma once
#ifdef __CUDACC__
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace gm {

__device__ __forceinline__ void mbar_init(uint32_t bar, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void mbar_arrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void mbar_expect(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbar_wait(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nW: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra D;\nbra "
      "W;\nD:\n}" ::"r"(bar),
      "r"(parity)
      : "memory");
}
// Lanes of a warp that say that it is done with a slot. compute-sanitizer's racecheck sees no order in one
// lane's arrival after the other lanes' reads: it is given a build with GM_RACECHECK.
#ifdef GM_RACECHECK
constexpr int kArriving = 32;
#else
constexpr int kArriving = 1;
#endif

// The barrier counts this thread's arrival once its cp.async copies so far have landed.
__device__ __forceinline__ void mbar_arrive_after_copies(uint32_t bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

__device__ __forceinline__ void tensor_load_3d(uint32_t dst, const void* map, int x, int y, int z,
                                               uint32_t bar) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, "
      "%4}], [%5];" ::"r"(dst),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(bar)
      : "memory");
}
__device__ __forceinline__ void tensor_load_4d(uint32_t dst, const void* map, int x, int y, int z, int w,
                                               uint32_t bar) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, "
      "%4, %5}], [%6];" ::"r"(dst),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(bar)
      : "memory");
}
__device__ __forceinline__ void copy_16(uint32_t dst, const void* src) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}
// 16 bytes, or as many zeros if `bytes` is 0.
__device__ __forceinline__ void copy_16(uint32_t dst, const void* src, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
__device__ __forceinline__ void store_16(uint32_t dst, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(dst), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
// 4 bytes, or as many zeros.
__device__ __forceinline__ void copy_4(uint32_t dst, const void* src, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(dst), "l"(src), "r"(there ? 4 : 0)
               : "memory");
}

template <int REGISTERS>
__device__ __forceinline__ void registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Named barriers of `threads` threads, those that arrive included.
__device__ __forceinline__ void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void bar_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Ordinary stores to shared memory before this are seen by wgmma and the copy engine after it.
__device__ __forceinline__ void fence_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Keeps uses of d behind whatever stands before this.
template <int N>
__device__ __forceinline__ void hold(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// One value a warp, which the compiler then keeps in a uniform register.
__device__ __forceinline__ uint32_t uniform(uint32_t v) { return __shfl_sync(0xffffffffu, v, 0); }

// Descriptor of a tile of rows of 128 bytes in the 128-byte swizzle, eight rows in 1024 bytes. `across`:
// bytes to the next 64 elements of a row, which counts where the operand is not K-major.
__device__ __forceinline__ uint64_t tile_descriptor(uint32_t address, uint32_t across) {
  return (static_cast<uint64_t>(1) << 62) | (static_cast<uint64_t>(1024 >> 4) << 32) |
         (static_cast<uint64_t>(across >> 4) << 16) | ((address & 0x3ffff) >> 4);
}

#define GM_D16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define GM_D32 GM_D16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define GM_D64                                                                                        \
  GM_D32                                                                                              \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, " \
  "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define GM_F8(i)                                                                              \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define GM_F16(i) GM_F8(i), GM_F8(i + 8)
#define GM_F32(i) GM_F16(i), GM_F16(i + 16)
#define GM_F64(i) GM_F32(i), GM_F32(i + 32)

// D[64, N] = A B + (add ? D : 0). scores: A and B in shared memory, both K-major. values: A in registers, B
// in shared memory with its N elements in a row.
template <typename T, int N>
struct Wgmma;

// D, F: accumulators; P0 .. P2 and A: the numbers of the operands that follow them.
#define GM_WGMMA(T, TYPE, N, D, F, P0, P1, P2, A, P4, P5)                                                \
  template <>                                                                                            \
  struct Wgmma<T, N> {                                                                                   \
    static __device__ __forceinline__ void scores(float (&d)[N / 2], uint64_t a, uint64_t b, int add) {  \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N   \
                   "k16.f32." TYPE "." TYPE " {" D "}, " P0 ", " P1 ", p, 1, 1, 0, 0;\n}"                \
                   : F(0)                                                                                \
                   : "l"(a), "l"(b), "r"(add));                                                          \
    }                                                                                                    \
    static __device__ __forceinline__ void values(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, \
                                                  int add) {                                             \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N   \
                   "k16.f32." TYPE "." TYPE " {" D "}, {" A "}, " P4 ", p, 1, 1, 1;\n}"                  \
                   : F(0)                                                                                \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                      \
    }                                                                                                    \
  };
#define GM_WGMMAS(T, TYPE)                                                                       \
  GM_WGMMA(T, TYPE, 64, GM_D32, GM_F32, "%32", "%33", "%34", "%32, %33, %34, %35", "%36", "%37") \
  GM_WGMMA(T, TYPE, 128, GM_D64, GM_F64, "%64", "%65", "%66", "%64, %65, %66, %67", "%68", "%69")
GM_WGMMAS(__nv_bfloat16, "bf16")
GM_WGMMAS(__half, "f16")

// Two floats rounded to a pair of T, the first one low.
template <typename T>
__device__ __forceinline__ uint32_t packed(float low, float high);
template <>
__device__ __forceinline__ uint32_t packed<__nv_bfloat16>(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
template <>
__device__ __forceinline__ uint32_t packed<__half>(float low, float high) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// The same to the dtype of the output, where that is known only at run time: fp16 or bf16, by p.bf16.
struct EitherHalf {};
template <typename T, typename P>
__device__ __forceinline__ uint32_t packed_as(const P& p, float low, float high) {
  if constexpr (std::is_same_v<T, EitherHalf>)
    return p.bf16 ? packed<__nv_bfloat16>(low, high) : packed<__half>(low, high);
  else
    return packed<T>(low, high);
}
template <typename T>
struct Stored {
  using type = T;
};
template <>
struct Stored<EitherHalf> {
  using type = uint16_t;
};

// Two e4m3 codes each in the low and in the high half of a word -> pairs of fp16, exactly.
__device__ __forceinline__ uint2 decoded(uint32_t codes) {
  uint2 r;
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}"
      : "=r"(r.x), "=r"(r.y)
      : "r"(codes));
  return r;
}

// Two elements of q as float32.
__device__ __forceinline__ float2 unpacked(uint32_t pair, bool bf16) {
  return bf16 ? make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u))
              : __half22float2(*reinterpret_cast<const __half2*>(&pair));
}
// Queries over codes become fp16. A row is multiplied by a power of two first that brings its largest element
// to 2^14 .. 2^15, as far as float32 has one, so that all of bf16's range that counts is kept.
struct RowPower {
  float factor, back;
  explicit __device__ __forceinline__ RowPower(float largest) {
    const int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 127;
    const uint32_t field = static_cast<uint32_t>(min(127 + 14 - exponent, 253));
    factor = __uint_as_float(field << 23), back = __uint_as_float((254 - field) << 23);
  }
};

__device__ __forceinline__ float max_or_nan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace gm
#endif
