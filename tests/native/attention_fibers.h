// What attention on sm_80 needs of a GPU beside sm80_fibers.h.
#pragma once
#include "sm80_fibers.h"

#define __align__(bytes) __attribute__((aligned(bytes)))

struct float2 {
  float x, y;
};
struct int2 {
  int x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline int2 make_int2(int x, int y) { return {x, y}; }

using __nv_bfloat16 = Bf16;
struct __half {
  uint16_t bits;
};
struct __half2 {
  __half x, y;
};

namespace gm {

using std::fmaf;

// An array of dynamic shared memory that kernels declare by this name.
inline thread_local uint8_t smem[227 << 10] __attribute__((aligned(1024)));

template <>
struct Num<__half> : Products<__half> {
  static float to_float(__half v) {
    _Float16 number;
    std::memcpy(&number, &v, 2);
    return float(number);
  }
  static __half round(float v) {
    const _Float16 number = _Float16(v);
    __half bits;
    std::memcpy(&bits, &number, 2);
    return bits;
  }
  static float half(uint32_t word, int high) {
    return to_float({uint16_t(high ? word >> 16 : word & 0xffff)});
  }
};

// A word of eight rows, four lanes each: lane i has the words of row i / 4, columns 2 (i % 4) and the next one, of 8 x 8 elements at the
// addresses that lanes 8 m .. 8 m + 7 give.
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t from) {
  const int lane = fibers::current % 32;
  of_warp(from, [&](auto given) {
    for (int i = 0; i < 4; ++i) {
      const auto element = [&](int row, int column) {
        uint16_t bits;
        std::memcpy(&bits, fibers::memory_at(uint32_t(given(i * 8 + row)) + column * 2), 2);
        return uint32_t(bits);
      };
      r[i] = element(lane % 4 * 2, lane / 4) | element(lane % 4 * 2 + 1, lane / 4) << 16;
    }
    return 0;
  });
}
inline uint32_t movmatrix_trans(uint32_t pair) {
  const int lane = fibers::current % 32;
  return of_warp(pair, [=](auto given) {
    const auto element = [&](int row, int column) {
      return uint32_t(given(row * 4 + column / 2)) >> column % 2 * 16 & 0xffff;
    };
    return element(lane % 4 * 2, lane / 4) | element(lane % 4 * 2 + 1, lane / 4) << 16;
  });
}
// Word i of lane j of four neighbouring lanes becomes word j of lane i.
inline void transpose_quad(uint32_t (&w)[4], int lane) {
  uint32_t rows[4][4];
  for (int i = 0; i < 4; ++i)
    of_warp(w[i], [&](auto given) {
      for (int j = 0; j < 4; ++j) rows[j][i] = uint32_t(given(lane / 4 * 4 + j));
      return 0;
    });
  for (int i = 0; i < 4; ++i) w[i] = rows[i][lane % 4];
}
inline void cp_async_4(uint32_t to, const void* from, uint32_t bytes) {
  fibers::copies[fibers::current].back().push_back({to, from, bytes, 4});
}
inline unsigned atomic_inc_acq_rel(unsigned* at) { return atomic_add(at, 1u); }
inline void store_16(void* to, uint4 words) { std::memcpy(to, &words, 16); }
inline float exp2_approx(float v) { return std::exp2(v); }
inline float rcp_approx(float v) { return 1 / v; }
inline float fmax_nan(float a, float b) { return a != a || b != b ? NAN : std::fmax(a, b); }

}  // namespace gm

inline uint32_t __float_as_uint(float v) { return uint32_t(gm::bits_of(v)); }
inline float __uint_as_float(uint32_t v) { return gm::float_of(int(v)); }
inline float __log2f(float v) { return std::log2(v); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return uint32_t(uint64_t(a) * b >> 32); }
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selectors) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  uint32_t r = 0;
  for (int i = 0; i < 4; ++i) r |= uint32_t(bytes >> (selectors >> i * 4 & 7) * 8 & 255) << i * 8;
  return r;
}
inline float2 __half22float2(__half2 v) {
  return {gm::Num<__half>::to_float(v.x), gm::Num<__half>::to_float(v.y)};
}
inline __half2 __hmul2(__half2 a, __half2 b) {
  const float2 x = __half22float2(a), y = __half22float2(b);
  return {gm::Num<__half>::round(x.x * y.x), gm::Num<__half>::round(x.y * y.y)};
}
inline float __shfl_xor_sync(uint32_t, float value, int mask) {
  return gm::float_of(int(gm::shuffle_xor(uint32_t(gm::bits_of(value)), mask)));
}
inline uint32_t __shfl_sync(uint32_t, uint32_t value, int from) {
  return gm::of_warp(value, [=](auto given) { return uint32_t(given(from)); });
}
inline float __shfl_sync(uint32_t, float value, int from) {
  return gm::float_of(
      gm::of_warp(uint64_t(uint32_t(gm::bits_of(value))), [=](auto given) { return int(given(from)); }));
}
template <typename Fold>
int reduce_warp(int value, Fold fold) {
  return gm::of_warp(uint64_t(uint32_t(value)), [=](auto given) {
    int result = int(given(0));
    for (int lane = 1; lane < 32; ++lane) result = fold(result, int(given(lane)));
    return result;
  });
}
inline int __reduce_min_sync(uint32_t, int value) {
  return reduce_warp(value, [](int a, int b) { return std::min(a, b); });
}
inline int __reduce_max_sync(uint32_t, int value) {
  return reduce_warp(value, [](int a, int b) { return std::max(a, b); });
}
template <typename T>
T __reduce_add_sync(uint32_t, T value) {
  return T(reduce_warp(int(value), [](int a, int b) { return int(uint32_t(a) + uint32_t(b)); }));
}
inline size_t __cvta_generic_to_shared(const void* at) { return gm::smem_u32(at); }
inline bool __any_sync(uint32_t, bool value) { return gm::ballot(value) != 0; }
