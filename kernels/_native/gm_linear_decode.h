// Decodes lines of cpu_rows16_v1, of 64 bytes, a 32-bit word of each of 16 output rows, to a vector of 16 floats per
// column (F32) or of 16 bf16 pairs per pair of columns (Bf16, AVX-512 BF16). Values are exact; scales are applied later.
#pragma once
#include "gm_cpu.h"

namespace {
namespace lin {

constexpr int kRows = 16;                   // output rows of a block
constexpr int kParts = kRows / gm::kLanes;  // registers of a block's row vector

struct V {
  gm::vf p[kParts];
};
struct W {
  gm::vu p[kParts];
};

inline W load_line(const uint8_t* line) {
  // Register by register: GCC would copy the struct through the stack in small pieces, without store forwarding.
  W w;
#pragma GCC unroll 4
  for (int i = 0; i < kParts; ++i) std::memcpy(&w.p[i], line + i * int(sizeof w.p[i]), sizeof w.p[i]);
  return w;
}

// int5, int6: of cpu_groups16_v1, only with int8 activations.
enum class Format { int4, e2m1, int8, e4m3, f32, f16, bf16, int5, int6 };

// Bits of a code in a line, by format.
template <Format F>
constexpr int kBits = F == Format::int4 || F == Format::e2m1   ? 4
                      : F == Format::int5 || F == Format::int6 ? 4
                      : F == Format::int8 || F == Format::e4m3 ? 8
                      : F == Format::f32                       ? 32
                                                               : 16;

inline gm::vf e4m3_to_float(gm::vu at_top) {  // the byte in bits 24..31
  // Exponent and mantissa moved to float's place, times 2^120: exact, subnormals included.
  return (gm::vf)(((gm::vi)at_top >> 4) & (int32_t)0x87f00000) * 0x1p120f;
}

inline gm::vf half_to_float(gm::vu h) {
  const gm::vf scaled = (gm::vf)((h & 0x7fffu) << 13) * 0x1p112f;
  const gm::vu infnan = (h & 0x7c00u) == 0x7c00u ? gm::vu{} + 0x7f800000u : gm::vu{};
  return (gm::vf)((gm::vu)scaled | infnan | ((h & 0x8000u) << 16));
}

// Tables of 4-bit codes: float values, and bf16 values twice, so that the fifth bit of the index is ignored.
struct Table {
  alignas(64) float f[16];
  alignas(64) uint16_t b[32];
};

inline Table make_table(Format format, float bias) {
  static const float e2m1[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};
  Table t;
  for (int i = 0; i < 16; ++i) {
    t.f[i] = format == Format::e2m1 ? e2m1[i] : float(i) - bias;
    t.b[i] = t.b[i + 16] = gm::from_float<gm::bf16>(t.f[i]).bits;
  }
  return t;
}

// 4-bit codes in the low bits of each lane (higher bits are ignored) -> floats.
template <Format F>
inline gm::vf lookup(gm::vu code, const Table& t, float bias) {
#if GM_X86_AVX512
  (void)bias;
  return (gm::vf)_mm512_permutexvar_ps((__m512i)code, _mm512_load_ps(t.f));
#else
  (void)t;
  if constexpr (F == Format::int4) return __builtin_convertvector((gm::vi)(code & 15u), gm::vf) - bias;
  const gm::vu sign = (code & 8u) << 28, magnitude = code & 7u;
#if GM_X86_AVX2
  const __m256 value = _mm256_permutevar8x32_ps(_mm256_load_ps(t.f), (__m256i)magnitude);
  return (gm::vf)((gm::vu)value | sign);
#else
  // Twice the value: 0 1 2 3 4 6 8 12.
  const gm::vu shifted = (2u | (magnitude & 1u)) << (((magnitude >> 1) - 1u) & 31u);
  const gm::vu twice = magnitude < 2u ? magnitude : shifted;
  return (gm::vf)((gm::vu)(__builtin_convertvector((gm::vi)twice, gm::vf) * 0.5f) | sign);
#endif
#endif
}

// ---- float32 arithmetic: one column per step
// -----------------------------------------------------------------------------

struct F32 {
  using Act = float;  // one activation
  using Operand = V;  // one column of a block
  static constexpr int kColumns = 1;
  template <Format F>
  static constexpr int kSteps = 32 / kBits<F>;
  static inline void mac(V& acc, const V& w, const float* x) {
    const gm::vf v = gm::splat(*x);
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i) acc.p[i] = gm::fma(w.p[i], v, acc.p[i]);
  }

  // Step s of a line is column s.
  template <Format F>
  static inline V decode(const W& w, int s, const Table& t, float bias) {
    V v;
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i) {
      const gm::vu u = w.p[i];
      if constexpr (kBits<F> == 4)
        v.p[i] = lookup<F>(u >> (8 * (s & 3) + (s >> 2) * 4), t, bias);
      else if constexpr (F == Format::int8)
        v.p[i] = __builtin_convertvector((gm::vi)((u >> (8 * s)) & 255u), gm::vf) - bias;
      else if constexpr (F == Format::e4m3)
        v.p[i] = e4m3_to_float(u << (24 - 8 * s));
      else if constexpr (F == Format::f16)
        v.p[i] = half_to_float(s ? u >> 16 : u & 0xffffu);
      else if constexpr (F == Format::bf16)
        v.p[i] = (gm::vf)(s ? u & 0xffff0000u : u << 16);
      else
        v.p[i] = (gm::vf)u;
    }
    return v;
  }

  // Activation of packed column c.
  template <class T>
  static inline float act(const T* x, int64_t c) {
    return gm::to_float(x[c]);
  }
};

// ---- bf16 pairs: two columns per step, products exact, sums in float32
// -----------------------------------------------------

#if GM_X86_BF16
struct Bf16 {
  using Act = uint32_t;  // two activations
  using Operand = __m512i;
  static constexpr int kColumns = 2;
  template <Format F>
  static constexpr int kSteps = 16 / kBits<F>;
  static inline void mac(V& acc, __m512i w, const uint32_t* x) {
    acc.p[0] =
        (gm::vf)_mm512_dpbf16_ps((__m512)acc.p[0], (__m512bh)w, (__m512bh)_mm512_set1_epi32(int32_t(*x)));
  }

  // Step s holds columns (first(s), first(s) + 2) of a line of 4-bit or 8-bit codes, (0, 1) of 16-bit ones.
  template <Format F>
  static inline __m512i decode(const W& line, int s, const Table& t, float bias) {
    const __m512i w = (__m512i)line.p[0];
    if constexpr (kBits<F> == 4) {
      return _mm512_permutexvar_epi16(_mm512_srli_epi32(w, 8 * (s & 1) + 4 * (s >> 1)),
                                      _mm512_load_si512(t.b));
    } else if constexpr (F == Format::int8) {
      const __m512i low = _mm512_and_si512(_mm512_srli_epi32(w, 8 * s), _mm512_set1_epi32(255));
      const __m512i high = _mm512_and_si512(_mm512_srli_epi32(w, 16 + 8 * s), _mm512_set1_epi32(255));
      const __m512 b = _mm512_set1_ps(bias);
      const __m512i even = _mm512_castps_si512(_mm512_sub_ps(_mm512_cvtepi32_ps(low), b));
      const __m512i odd = _mm512_castps_si512(_mm512_sub_ps(_mm512_cvtepi32_ps(high), b));
      return _mm512_or_si512(odd, _mm512_srli_epi32(even, 16));  // at most 8 significant bits: exact in bf16
    } else if constexpr (F == Format::e4m3) {
      // The byte at the top of each half: sign and magnitude fall into bf16's places, the exponent is
      // rebiased, and the eight magnitudes with exponent 0 (subnormals) come from a table.
      alignas(64) static const uint16_t small[32] = {0,      0x3b00, 0x3b80, 0x3bc0,
                                                     0x3c00, 0x3c20, 0x3c40, 0x3c60};
      const __m512i byte = s ? _mm512_srli_epi16(w, 8) : _mm512_and_si512(w, _mm512_set1_epi16(0xff));
      const __m512i top = _mm512_slli_epi16(byte, 8);
      const __m512i magnitude = _mm512_and_si512(_mm512_slli_epi16(byte, 4), _mm512_set1_epi16(0x07f0));
      const __mmask32 subnormal = _mm512_testn_epi16_mask(byte, _mm512_set1_epi16(0x78));
      __m512i value = _mm512_add_epi16(magnitude, _mm512_set1_epi16(0x3c00));
      value = _mm512_mask_permutexvar_epi16(value, subnormal, byte, _mm512_load_si512(small));
      return _mm512_or_si512(value, _mm512_and_si512(top, _mm512_set1_epi16(int16_t(0x8000))));
    } else {
      return w;
    }
  }

  template <Format F>
  static inline int64_t column(int64_t pair) {
    if constexpr (kBits<F> == 16) return 2 * pair;
    constexpr int64_t per = kSteps<F>;
    const int64_t s = pair % per;
    return pair / per * (2 * per) + (s & 1) + 4 * (s >> 1);
  }
};
#endif

// ---- scales and zeros, 16 values of one group of a block
// ----------------------------------------------------------------

enum : int { kNone = -1, kE8M0 = 20, kI8 = 21, kE4M3 = GM_F8E4M3 };

// Signed bytes, as many as a register has floats.
inline gm::vf load_i8(const int8_t* from) {
#if GM_X86_AVX512
  return (gm::vf)_mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif GM_X86_AVX2
  return (gm::vf)_mm256_cvtepi32_ps(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  typedef int8_t bytes __attribute__((vector_size(gm::kLanes)));
  bytes b;
  std::memcpy(&b, from, sizeof b);
  return __builtin_convertvector(__builtin_convertvector(b, gm::vi), gm::vf);
#endif
}

inline V load16(const void* base, int type, int64_t index) {
  V v;
  const int64_t at = index * kRows;
#pragma GCC unroll 4
  for (int i = 0; i < kParts; ++i) {
    const int64_t o = at + i * gm::kLanes;
    if (type == GM_BF16)
      v.p[i] = gm::load(static_cast<const gm::bf16*>(base) + o);
    else if (type == GM_F32)
      v.p[i] = gm::load(static_cast<const float*>(base) + o);
    else if (type == GM_F16)
      v.p[i] = gm::load(static_cast<const gm::f16*>(base) + o);
    else if (type == kI8)
      v.p[i] = load_i8(static_cast<const int8_t*>(base) + o);
    else {
      typedef uint8_t bytes __attribute__((vector_size(gm::kLanes)));
      bytes b;
      std::memcpy(&b, static_cast<const uint8_t*>(base) + o, sizeof b);
      const gm::vu u = __builtin_convertvector(b, gm::vu);
      if (type == kE4M3)
        v.p[i] = e4m3_to_float(u << 24);
      else if (type == kE8M0)
        v.p[i] = (gm::vf)(u == 0u ? gm::vu{} + 0x400000u : u == 255u ? gm::vu{} + 0x7fc00000u : u << 23);
      else
        v.p[i] = __builtin_convertvector((gm::vi)u, gm::vf);  // GM_U8: integer zeros
    }
  }
  return v;
}

}  // namespace lin
}  // namespace
