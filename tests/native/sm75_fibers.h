// What kernels/_native/sm75/primitives.cuh and the schedules on it need of a GPU, for a CPU (sm80_fibers.h): the instructions of Turing that
// ptx.cuh wraps there. Loads and stores happen at once. `fault` plants one fault: 1 = barriers of CTAs do nothing.
#pragma once
#define cp_async_16 cp_async_16_of_sm80
#define cp_async_commit cp_async_commit_of_sm80
#define cp_async_wait cp_async_wait_of_sm80
#include "sm80_fibers.h"
#undef cp_async_16
#undef cp_async_commit
#undef cp_async_wait

#define __align__(bytes) __attribute__((aligned(bytes)))
#define __noinline__

struct float2 {
  float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
using __nv_bfloat16 = Bf16;
struct __nv_bfloat162 {
  Bf16 x, y;
};
struct __half {
  uint16_t bits;
};
struct __half2 {
  __half x, y;
};
inline float __half2float(__half v) {
  _Float16 number;
  std::memcpy(&number, &v, 2);
  return float(number);
}
inline __half __float2half_rn(float v) {
  const _Float16 number = _Float16(v);
  __half bits;
  std::memcpy(&bits, &number, 2);
  return bits;
}
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {gm::Num<Bf16>::round(x), gm::Num<Bf16>::round(y)};
}
inline float2 __half22float2(__half2 v) { return {__half2float(v.x), __half2float(v.y)}; }
inline float __uint_as_float(uint32_t v) { return gm::float_of(int(v)); }
uint32_t __byte_perm(uint32_t, uint32_t, uint32_t);  // of decoders, which are not executed

namespace gm {

// An array of dynamic shared memory that kernels declare by this name.
inline thread_local uint8_t smem[64 << 10] __attribute__((aligned(128)));

inline uint4 load_16(const void* from) {
  uint4 v;
  std::memcpy(&v, from, 16);
  return v;
}
inline void st_shared(uint32_t to, uint4 v) { std::memcpy(fibers::memory_at(to), &v, 16); }
inline void st_shared(uint32_t to, uint16_t v) { std::memcpy(fibers::memory_at(to), &v, 2); }
inline void ldmatrix_x4(uint4& r, uint32_t from) {
  uint32_t words[4];
  ldmatrix_x4(words, from);
  r = make_uint4(words[0], words[1], words[2], words[3]);
}

// d += a b for 16 x 8 x 8, in the layout of mma.m16n8k8: a word of row g in a0, of row g + 8 in a1, of column g in b.
inline void mma_m16n8k8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  const int base = fibers::current / 32 * 32, lane = fibers::current % 32, g = lane / 4, t = lane % 4;
  auto& own = fibers::registers[fibers::current];
  const auto half = [](uint32_t word, int high) {
    return __half2float({uint16_t(high ? word >> 16 : word & 0xffff)});
  };
  own[0] = a0, own[1] = a1, own[4] = b;
  warp_sync();
  for (int i = 0; i < 4; ++i)
    for (int k = 0; k < 8; ++k)
      d[i] += half(fibers::registers[base + g * 4 + k / 2][i / 2], k & 1) *
              half(fibers::registers[base + (2 * t + i % 2) * 4 + k / 2][4], k & 1);
  warp_sync();
}

}  // namespace gm

#include "sm75/primitives.cuh"
