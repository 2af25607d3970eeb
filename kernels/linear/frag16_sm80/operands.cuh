// How a lane reads and decodes a tile of a frag16 layout into the A operand of mma.sync with the scales multiplied in,
// which is cheaper than scaling sums for many rows of x: the classes of ../frag16_sm90/decoders_wgmma.cuh, as far as
// sm_80 has their instructions.
#pragma once
#include "linear/frag16_sm90/decoders_wgmma.cuh"

#ifdef __CUDACC__
namespace gm {

// Before sm_90 a pair of bf16 has no multiplication, only a multiply-add: a b + -0.
__device__ __forceinline__ uint32_t times(uint32_t a, uint32_t b) {
  return pair_fma(a, b, 0x80008000u, __nv_bfloat16());
}

template <typename T, bool ZERO, bool SPLIT_SCALES>
struct Int4Sm80Scales : Int4Scales<T, ZERO, SPLIT_SCALES> {};

// The constants and the reasons for them are those of the base.
template <bool ZERO, bool SPLIT_SCALES>
struct Int4Sm80Scales<__nv_bfloat16, ZERO, SPLIT_SCALES> : Int4Scales<__nv_bfloat16, ZERO, SPLIT_SCALES> {
  using Base = Int4Scales<__nv_bfloat16, ZERO, SPLIT_SCALES>;
  using Base::high, Base::low, Base::minus;
  template <int AT>
  __device__ __forceinline__ void set(uint32_t raw, uint32_t zeros, int half) {
    if constexpr (SPLIT_SCALES && !ZERO) {
      Base::template set<AT>(raw, zeros, half);  // multiplies nothing
    } else {
      if constexpr (SPLIT_SCALES) {
        const float2 s = __half22float2(reinterpret_cast<const __half2&>(raw));
        raw = packed<__nv_bfloat16>(s.x, s.y);
        const uint32_t rest =
            packed<__nv_bfloat16>(s.x - __uint_as_float(raw << 16), s.y - __uint_as_float(raw & 0xffff0000u));
        low[0] = twice<0>(rest), low[1] = twice<1>(rest);
      } else if constexpr (!ZERO) {
        const uint32_t second = times(raw, Base::kMinus);
        raw = times(raw, Base::kTimes), low[0] = twice<0>(second), low[1] = twice<1>(second);
      }
      high[0] = twice<0>(raw), high[1] = twice<1>(raw);
      if constexpr (ZERO) {
        minus[0] = times(__byte_perm(zeros, 0, 0x4040 + AT * 0x0101), 0xF200F200u);
        minus[1] = times(__byte_perm(zeros, 0, 0x4141 + AT * 0x0101), 0xF200F200u);
      }
    }
  }
  __device__ __forceinline__ uint32_t one(uint32_t code, int row) const {
    if constexpr (!SPLIT_SCALES && !ZERO) return pair_fma(code, high[row], low[row], __nv_bfloat16());
    const uint32_t u = pair_fma(code, row == 0 ? 0x72007200u : 0x70007000u, minus[row], __nv_bfloat16());
    if constexpr (!SPLIT_SCALES) return times(u, high[row]);
    return pair_fma(u, high[row], times(u, low[row]), __nv_bfloat16());
  }
  __device__ __forceinline__ void decode(uint32_t word, uint32_t (&a)[4]) const {
    const uint32_t next = word >> 8;
    a[0] = one(word & 0x000f000fu, 0), a[1] = one(word & 0x00f000f0u, 1);
    a[2] = one(next & 0x000f000fu, 0), a[3] = one(next & 0x00f000f0u, 1);
  }
};

template <typename T, int G, bool ZERO, bool SPLIT_SCALES>
struct Int4Sm80Operand : Int4Operand<T, G, ZERO, SPLIT_SCALES> {
  using Part = typename Int4Operand<T, G, ZERO, SPLIT_SCALES>::Part;
  Int4Sm80Scales<T, ZERO, SPLIT_SCALES> scales;
  __device__ __forceinline__ void decode(int step, const Part& part, uint32_t (&a)[4], int scales_half) {
    if (step % (8 / G) == 0) {
      if (G == 4 && (step & 2))
        scales.template set<2>(part.scales[sizeof(part.scales) / 4 - 1], part.zeros[0], scales_half);
      else
        scales.template set<0>(part.scales[0], part.zeros[0], scales_half);
    }
    scales.decode(part.q[step & 3], a);
  }
};

// int8 under scales of the type of x (SAME) or of the other 16-bit type, as in the base.
template <typename T, int G, bool SAME>
struct Int8Sm80Operand : Int8Operand<T, G, SAME> {};

// bf16 under bf16 scales: a byte at bit 0 is a float, c x 2^-133, and 128 x a scale is one, so one multiply-add subtracts
// 128, scales, and rounds once. 2^-32 keeps the factors in range.
template <int G>
struct Int8Sm80Operand<__nv_bfloat16, G, true> : Int8Operand<__nv_bfloat16, G, true> {
  static constexpr float kFactor = 4294967296.f;                         // 2^32
  static constexpr uint32_t kTimes = 0x72007200u, kMinus = 0xB300B300u;  // 2^101; -128 x 2^-32
  uint32_t high[2], low[2];
  __device__ __forceinline__ void decode(int step,
                                         const typename Int8Operand<__nv_bfloat16, G, true>::Part& part,
                                         uint32_t (&a)[4], int) {
    if (step % (8 / G) == 0) {
      const uint32_t raw = part.scales[G == 4 ? step >> 1 & 1 : 0];
      const uint32_t by = times(raw, kTimes), minus = times(raw, kMinus);
      high[0] = twice<0>(by), high[1] = twice<1>(by), low[0] = twice<0>(minus), low[1] = twice<1>(minus);
    }
    int8_bytes(part.low[step & 3], part.high[step & 3], a);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = pair_fma(a[i], high[i & 1], low[i & 1], __nv_bfloat16());
  }
};

}  // namespace gm
#endif
