// Hopper's instructions as latent attention uses them beside those of _hopper_sm90.cuh: boxes of five
// dimensions, and products of weights in shared memory with values.
#pragma once
#include "attention/sm90/_hopper_sm90.cuh"

#ifdef __CUDACC__
namespace gm {

// Descriptor of a tile of rows of 128 bytes in the 128-byte swizzle. `along`: bytes to the next eight rows;
// `across`: bytes to the next 64 elements of a row, which counts where the operand is not K-major.
__device__ __forceinline__ uint64_t strided_descriptor(uint32_t address, uint32_t along, uint32_t across) {
  return (static_cast<uint64_t>(1) << 62) | (static_cast<uint64_t>(along >> 4) << 32) |
         (static_cast<uint64_t>(across >> 4) << 16) | ((address & 0x3ffff) >> 4);
}

__device__ __forceinline__ void tensor_load_2d(uint32_t dst, const void* map, int x, int y, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3}], [%4];" ::"r"(dst),
      "l"(map), "r"(x), "r"(y), "r"(bar)
      : "memory");
}
__device__ __forceinline__ void prefetch_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// A box of [groups of eight keys][64 elements at a time][8 keys][64 elements];
// z counts 64 elements, u groups.
__device__ __forceinline__ void box_load(uint32_t dst, const void* map, int z, int u, int block,
                                         uint32_t bar) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%2, %3, %4, %5}], [%6];" ::"r"(dst),
      "l"(map), "r"(0), "r"(z), "r"(u), "r"(block), "r"(bar)
      : "memory");
}

#define GM_D128                                                                                       \
  GM_D64                                                                                              \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, " \
  "%83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, " \
  "%102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, "  \
  "%118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define GM_F128(i) GM_F64(i), GM_F64(i + 64)

// D[64, 256] += A B, B in shared memory with its 256 elements in a row;
// A in registers, or in shared memory and K-major.
template <typename T>
__device__ __forceinline__ void add_values(float (&d)[128], const uint32_t (&a)[4], uint64_t b);
template <typename T>
__device__ __forceinline__ void add_values(float (&d)[128], uint64_t a, uint64_t b);

#define GM_ADD_VALUES(T, TYPE)                                                                         \
  template <>                                                                                          \
  __device__ __forceinline__ void add_values<T>(float (&d)[128], const uint32_t (&a)[4], uint64_t b) { \
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " {" GM_D128             \
                 "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;"                                      \
                 : GM_F128(0)                                                                          \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                \
  }                                                                                                    \
  template <>                                                                                          \
  __device__ __forceinline__ void add_values<T>(float (&d)[128], uint64_t a, uint64_t b) {             \
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " {" GM_D128             \
                 "}, %128, %129, 1, 1, 1, 0, 1;"                                                       \
                 : GM_F128(0)                                                                          \
                 : "l"(a), "l"(b));                                                                    \
  }
GM_ADD_VALUES(__nv_bfloat16, "bf16")
GM_ADD_VALUES(__half, "f16")

}  // namespace gm
#endif
