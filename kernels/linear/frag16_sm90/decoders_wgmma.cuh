// How a lane reads and decodes a tile of a frag16 layout into wgmma's register operand: a class per kind of weight, as
// decoders_mma.cuh has for mma.sync. Here scales multiply the operand, which is cheaper than the sums for many rows of
// x.
//
//   Type                         of the operand
//   kBytes, kFactor              as in decoders_mma.cuh
//   Part                         a lane's words of 64 k: load(address, lane, half), any(half)
//   decode(step, part, a, half)  decodes the A operand of 16 k; called in the order of steps
#pragma once
#include <type_traits>

#include "decoders_mma.cuh"
#include "sm90/ptx.cuh"

#ifdef __CUDACC__
namespace gm {

__device__ __forceinline__ uint32_t pair_sub(uint32_t a, uint32_t b) {
  uint32_t out;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
template <int ROW>  // the low (row g) or high half (row g + 8) of a word, twice
__device__ __forceinline__ uint32_t twice(uint32_t word) {
  return __byte_perm(word, 0, ROW == 0 ? 0x1010 : 0x3232);
}

// (code - zero) x scale / kFactor, rounded once to T, of the words of rows g and g + 8.
//
// bf16: the low eight bits of a bf16 are an integer x 2^-133, subnormal or not. So codes at bits 0 and 4 of a half are
// valid floats, c x 2^-133 and c x 2^-129, and one multiply-add subtracts 8, scales, and rounds once. 2^-32 keeps the
// factors in range. A zero point times a scale would be rounded: it is subtracted first. SPLIT_SCALES: fp16 scales, held
// as the sum of two bf16 (11 bits are 8 and 3, and a code times 3 bits is exact).
template <typename T, bool ZERO, bool SPLIT_SCALES>
struct Int4Scales {
  static constexpr float kFactor = 4294967296.f;                         // 2^32
  static constexpr uint32_t kTimes = 0x70007200u, kMinus = 0xB100B100u;  // (2^97, 2^101); -8 x 2^-32
  uint32_t high[2], low[2], minus[2];
  // raw: two scales; zeros: bytes AT and AT + 1 are two zero points.
  template <int AT>
  __device__ __forceinline__ void set(uint32_t raw, uint32_t zeros, int) {
    if constexpr (SPLIT_SCALES) {
      const float2 s = __half22float2(reinterpret_cast<const __half2&>(raw));
      const __nv_bfloat162 h = __floats2bfloat162_rn(s.x, s.y);
      const __nv_bfloat162 l = __floats2bfloat162_rn(s.x - __low2float(h), s.y - __high2float(h));
      const uint32_t second = reinterpret_cast<const uint32_t&>(l);
      raw = reinterpret_cast<const uint32_t&>(h), low[0] = twice<0>(second), low[1] = twice<1>(second);
    } else if constexpr (!ZERO) {
      const uint32_t second = pair_mul(raw, kMinus, T());
      raw = pair_mul(raw, kTimes, T()), low[0] = twice<0>(second), low[1] = twice<1>(second);
    }
    high[0] = twice<0>(raw), high[1] = twice<1>(raw);
    if constexpr (ZERO) {
      minus[0] = pair_mul(__byte_perm(zeros, 0, 0x4040 + AT * 0x0101), 0xF200F200u,
                          T());  // integers x 2^-133 by -2^101
      minus[1] = pair_mul(__byte_perm(zeros, 0, 0x4141 + AT * 0x0101), 0xF200F200u, T());
    } else {
      minus[0] = minus[1] = kMinus;
    }
  }
  __device__ __forceinline__ uint32_t one(uint32_t code, int row) const {
    if constexpr (!SPLIT_SCALES && !ZERO) return pair_fma(code, high[row], low[row], T());
    const uint32_t u = pair_fma(code, row == 0 ? 0x72007200u : 0x70007000u, minus[row], T());
    if constexpr (!SPLIT_SCALES) return pair_mul(u, high[row], T());
    return pair_fma(u, high[row], pair_mul(u, low[row], T()), T());
  }
  __device__ __forceinline__ void decode(uint32_t word, uint32_t (&a)[4]) const {
    const uint32_t next = word >> 8;
    a[0] = one(word & 0x000f000fu, 0), a[1] = one(word & 0x00f000f0u, 1);
    a[2] = one(next & 0x000f000fu, 0), a[3] = one(next & 0x00f000f0u, 1);
  }
};

// fp16: codes at bits 0 and 4 under the exponent of 1024 are 1024 + c and 1024 + 16 c.
template <bool ZERO, bool SPLIT_SCALES>
struct Int4Scales<__half, ZERO, SPLIT_SCALES> {
  static constexpr float kFactor = 1.f;
  uint32_t scale[2], minus[2];
  template <int AT>
  __device__ __forceinline__ void set(uint32_t raw, uint32_t zeros, int half) {
    if (!half) {  // bf16 scales
      const __half2 h = __floats2half2_rn(__uint_as_float(raw << 16), __uint_as_float(raw & 0xffff0000u));
      raw = reinterpret_cast<const uint32_t&>(h);
    }
    scale[0] = twice<0>(raw), scale[1] = twice<1>(raw);
    minus[0] = ZERO ? __byte_perm(zeros, 0x64u, 0x4040 + AT * 0x0101) : 0x64086408u;  // 1024 + zero
    // and -(64 + zero)
    minus[1] = ZERO ? __byte_perm(zeros, 0, 0x4141 + AT * 0x0101) << 4 | 0xD400D400u : 0xD480D480u;
  }
  template <uint32_t MASK>
  static __device__ __forceinline__ uint32_t number(uint32_t word) {
    uint32_t out;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(out) : "r"(word), "n"(MASK), "r"(0x64006400u));
    return out;
  }
  __device__ __forceinline__ void decode(uint32_t word, uint32_t (&a)[4]) const {
    const uint32_t next = word >> 8;
    a[0] = pair_mul(pair_sub(number<0x000f000fu>(word), minus[0]), scale[0], __half());
    a[1] = pair_mul(pair_fma(number<0x00f000f0u>(word), 0x2C002C00u, minus[1], __half()), scale[1], __half());
    a[2] = pair_mul(pair_sub(number<0x000f000fu>(next), minus[0]), scale[0], __half());
    a[3] = pair_mul(pair_fma(number<0x00f000f0u>(next), 0x2C002C00u, minus[1], __half()), scale[1], __half());
  }
};

// int4 in G groups a tile, with zero points (ZERO) or symmetric.
// SPLIT_SCALES: fp16 scales beside bf16 activations.
template <typename T, int G, bool ZERO, bool SPLIT_SCALES>
struct Int4Operand {
  using Type = T;
  using Scales = Int4Scales<T, ZERO, SPLIT_SCALES>;
  static constexpr int kBytes = kCodeBytes + G * kTileRows * (ZERO ? 3 : 2);
  static constexpr float kFactor = Scales::kFactor;
  Scales scales;
  struct Part {
    uint32_t q[4], scales[G == 4 ? 2 : 1], zeros[1];
    __device__ __forceinline__ void load(uint32_t tile, int lane, int half) {
      ld_shared(q, tile + half * 512 + lane * 16);
      if (G > 1 || half == 0) ld_shared(scales, tile + kCodeBytes + (lane >> 2) * (4 * G) + half * (2 * G));
      if constexpr (ZERO) {
        const uint32_t from = tile + kCodeBytes + 32 * G + (lane >> 2) * (2 * G) + half * G;
        if constexpr (G == 4) {
          ld_shared(zeros, from);
        } else if (G > 1 || half == 0) {
          zeros[0] = ld_shared<uint16_t>(from);
        }
      }
    }
    __device__ __forceinline__ uint32_t any(int half) const {  // a word of each load
      const uint32_t first = G > 1 || half == 0 ? scales[0] : 0,
                     second = ZERO && (G > 1 || half == 0) ? zeros[0] : 0;
      return q[0] | first | second;
    }
  };
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

// NVFP4 (BLOCK = 16) and MXFP4 (BLOCK = 32): block scales multiply the codes, exactly.
template <typename T, int BLOCK>
struct Fp4Operand {
  using Type = T;
  static constexpr int kScales = kTileK / BLOCK, kBytes = kCodeBytes + kTileRows * kScales;
  static constexpr float kFactor = 1.f;
  struct Part {
    uint32_t q[4], scales[kScales / 4];
    __device__ __forceinline__ void load(uint32_t tile, int lane, int half) {
      ld_shared(q, tile + half * 512 + lane * 16);
      ld_shared(scales, tile + kCodeBytes + (lane >> 2) * (2 * kScales) + half * kScales);
    }
    __device__ __forceinline__ uint32_t any(int) const { return q[0] | scales[0]; }
  };
  __device__ __forceinline__ void decode(int step, const Part& part, uint32_t (&a)[4], int) const {
    uint32_t factor, raw[4];
    if constexpr (BLOCK == 16)
      factor = nvfp4_factor<T>(part.scales[(step & 3) >> 1], step & 1);
    else
      factor = mxfp4_factor<T>(mxfp4_bytes<T>(part.scales[0]), step >> 1 & 1);
    fp4_pairs<T>(part.q[step & 3], raw);
    a[0] = times_half<T, 0>(raw[0], factor), a[1] = times_half<T, 1>(raw[1], factor);
    a[2] = times_half<T, 0>(raw[2], factor), a[3] = times_half<T, 1>(raw[3], factor);
  }
};

// A pair times a float32 factor, rounded once.
__device__ __forceinline__ uint32_t scaled_pair(uint32_t pair, float by, __nv_bfloat16) {
  const __nv_bfloat162 out =
      __floats2bfloat162_rn(__uint_as_float(pair << 16) * by, __uint_as_float(pair & 0xffff0000u) * by);
  return reinterpret_cast<const uint32_t&>(out);
}
__device__ __forceinline__ uint32_t scaled_pair(uint32_t pair, float by, __half) {
  const float2 values = __half22float2(reinterpret_cast<const __half2&>(pair));
  const __half2 out = __floats2half2_rn(values.x * by, values.y * by);
  return reinterpret_cast<const uint32_t&>(out);
}

// FP8 (E4M3) under one float32 scale per row and tile.
template <typename T>
struct Fp8Operand {
  using Type = T;
  static constexpr int kBytes = Fp8Tile<T>::kBytes;
  static constexpr float kFactor = 1.f;
  float by[2];
  struct Part {
    uint32_t q[2][4], scales[2];
    __device__ __forceinline__ void load(uint32_t tile, int lane, int half) {
      ld_shared(q[0], tile + half * 1024 + lane * 16), ld_shared(q[1], tile + half * 1024 + 512 + lane * 16);
      if (half == 0) ld_shared(scales, tile + 2 * kCodeBytes + (lane >> 2) * 8);
    }
    __device__ __forceinline__ uint32_t any(int half) const {
      return q[0][0] | q[1][0] | (half == 0 ? scales[0] : 0);
    }
  };
  __device__ __forceinline__ void decode(int step, const Part& part, uint32_t (&a)[4], int) {
    if (step == 0) by[0] = __uint_as_float(part.scales[0]), by[1] = __uint_as_float(part.scales[1]);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      uint32_t pairs[2];
      fp8_pairs<T>(part.q[step >> 1 & 1][(step & 1) * 2 + j], pairs);
      a[2 * j] = scaled_pair(pairs[0], by[0], T()), a[2 * j + 1] = scaled_pair(pairs[1], by[1], T());
    }
  }
};

// int8 as two planes of nibbles, symmetric around 128, in G groups a tile. SAME: scales have the type of x,
// and multiply pairs: an integer of 8 bits by a scale of x's type is rounded once. Other scales multiply in
// float32.
template <typename T, int G, bool SAME>
struct Int8Operand {
  using Type = T;
  static constexpr bool kHalf = std::is_same_v<T, __half>;
  static constexpr int kBytes = 2 * kCodeBytes + G * kTileRows * 2;
  static constexpr float kFactor = kHalf ? 1.f : IntegerFactors<T>::kFactor;
  uint32_t pair[2];
  float by[2];
  struct Part {
    uint32_t low[4], high[4], scales[G == 4 ? 2 : 1];
    __device__ __forceinline__ void load(uint32_t tile, int lane, int half) {
      ld_shared(low, tile + half * 512 + lane * 16),
          ld_shared(high, tile + kCodeBytes + half * 512 + lane * 16);
      if (G > 1 || half == 0)
        ld_shared(scales, tile + 2 * kCodeBytes + (lane >> 2) * (4 * G) + half * (2 * G));
    }
    __device__ __forceinline__ uint32_t any(int half) const {
      return low[0] | high[0] | (G > 1 || half == 0 ? scales[0] : 0);
    }
  };
  // code - 128, / kFactor, of two bytes. fp16 has no room for that factor beside a small scale.
  static __device__ __forceinline__ uint32_t number(uint32_t bytes) {
    if constexpr (kHalf)
      return pair_sub(bytes | 0x64006400u, 0x64806480u);
    else
      return pair_fma(bytes, IntegerFactors<T>::kAt0, IntegerFactors<T>::kMinus128, T());
  }
  __device__ __forceinline__ void decode(int step, const Part& part, uint32_t (&a)[4], int scales_half) {
    if (step % (8 / G) == 0) {
      const uint32_t two = part.scales[G == 4 ? step >> 1 & 1 : 0];
      if constexpr (SAME) {
        pair[0] = twice<0>(two), pair[1] = twice<1>(two);
      } else {
        const float2 both = two_scales<kScaleEither>(two, scales_half);
        by[0] = both.x, by[1] = both.y;
      }
    }
    uint32_t bytes[4];
    int8_bytes(part.low[step & 3], part.high[step & 3], bytes);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (SAME)
        a[i] = pair_mul(number(bytes[i]), pair[i & 1], T());
      else
        a[i] = scaled_pair(number(bytes[i]), by[i & 1], T());
    }
  }
};

}  // namespace gm
#endif
