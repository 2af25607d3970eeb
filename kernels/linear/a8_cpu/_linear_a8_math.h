// Integer dot products of cpu_rows16_v1 lines with int8 activations: the part that differs between code levels.
//
// A line (64 bytes: one 32-bit word of each of 16 output rows) is decoded into steps. A step has 32 bits of
// each row, four unsigned bytes (Dot4) or two int16 (Dot2), and is multiplied with 32 bits of x, which all
// rows share. Sums are exact. Level by level:
//
// - AVX-512 VNNI: vpdpbusd adds four products of bytes to an int32.
// - SSSE3, AVX2, AVX-512 BW: pmaddubsw adds two products to an int16, and saturates. Codes of at most 24 keep
//   kRun<F> lines of such sums within int16; they are then added to int32 sums. Codes of 8 bits are widened
//   to int16 and multiplied by pmaddwd, which adds two products to an int32 (Dot2).
// - elsewhere: plain vector arithmetic.
#pragma once
#include "gm_linear_decode.h"

#if defined(__SSSE3__) && !GM_X86_VNNI
#define GM_DOT4_INT16 1
#else
#define GM_DOT4_INT16 0
#endif

namespace {
namespace a8 {
using lin::Format;
using lin::kParts;
using lin::kRows;
using lin::W;

struct Int {  // 32 bits of each of 16 rows
  gm::vi p[kParts];
};

// A step from memory, register by register: see lin::load_line.
inline Int load_step(const Int* step) {
  Int w;
#pragma GCC unroll 4
  for (int i = 0; i < kParts; ++i) w.p[i] = step->p[i];
  return w;
}

// Keeps GCC from reassociating: adding products to each other first needs more registers than there are.
inline void in_order(gm::vi& acc) {
#if defined(__x86_64__)
  __asm__("" : "+v"(acc));
#else
  (void)acc;
#endif
}

// Offset of unsigned codes: 0 for integers (their zero point is a property of the weight), 12 for e2m1, whose doubled
// values are -12 to 12.
template <Format F>
constexpr int kCodeZero = F == Format::e2m1 ? 12 : 0;

// acc + x[0] * w[0] + ... + x[3] * w[3] in each lane; w unsigned bytes, x signed bytes.
inline gm::vi dot4(gm::vi acc, gm::vi w, gm::vi x) {
#if GM_X86_VNNI
  return (gm::vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
#else
#pragma GCC unroll 4
  for (int b = 0; b < 32; b += 8) acc += ((w >> b) & 255) * ((x << (24 - b)) >> 24);
  return acc;
#endif
}

#if GM_DOT4_INT16
// Pairs of products as int16, saturated; w unsigned bytes, x signed bytes.
inline gm::vi maddubs(gm::vi w, gm::vi x) {
#if GM_X86_AVX512
  return (gm::vi)_mm512_maddubs_epi16((__m512i)w, (__m512i)x);
#elif GM_X86_AVX2
  return (gm::vi)_mm256_maddubs_epi16((__m256i)w, (__m256i)x);
#else
  return (gm::vi)_mm_maddubs_epi16((__m128i)w, (__m128i)x);
#endif
}
inline gm::vi add_int16(gm::vi a, gm::vi b) {
#if GM_X86_AVX512
  return (gm::vi)_mm512_add_epi16((__m512i)a, (__m512i)b);
#elif GM_X86_AVX2
  return (gm::vi)_mm256_add_epi16((__m256i)a, (__m256i)b);
#else
  return (gm::vi)_mm_add_epi16((__m128i)a, (__m128i)b);
#endif
}
#endif

// x[0] * w[0] + x[1] * w[1] of int16 in each lane.
inline gm::vi dot2(gm::vi w, gm::vi x) {
#if GM_X86_AVX512
  return (gm::vi)_mm512_madd_epi16((__m512i)w, (__m512i)x);
#elif GM_X86_AVX2
  return (gm::vi)_mm256_madd_epi16((__m256i)w, (__m256i)x);
#elif defined(__SSSE3__) && GM_LANES == 4
  return (gm::vi)_mm_madd_epi16((__m128i)w, (__m128i)x);
#else
  return ((w << 16) >> 16) * ((x << 16) >> 16) + (w >> 16) * (x >> 16);
#endif
}

// The doubled values of four e2m1 codes per lane, plus 12: 12 13 14 15 16 18 20 24, 12 11 10 9 8 6 4 0.
inline gm::vi e2m1_codes(gm::vi codes) {
#define E2M1_TABLE 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0
#if GM_X86_AVX512
  const __m512i table = _mm512_broadcast_i32x4(_mm_setr_epi8(E2M1_TABLE));
  return (gm::vi)_mm512_shuffle_epi8(table, (__m512i)codes);
#elif GM_X86_AVX2
  const __m256i table = _mm256_broadcastsi128_si256(_mm_setr_epi8(E2M1_TABLE));
  return (gm::vi)_mm256_shuffle_epi8(table, (__m256i)codes);
#elif defined(__SSSE3__) && GM_LANES == 4
  return (gm::vi)_mm_shuffle_epi8(_mm_setr_epi8(E2M1_TABLE), (__m128i)codes);
#else
  static const uint8_t table[16] = {E2M1_TABLE};
  uint8_t bytes[sizeof codes];
  std::memcpy(bytes, &codes, sizeof codes);
  for (uint8_t& byte : bytes) byte = table[byte];
  std::memcpy(&codes, bytes, sizeof codes);
  return codes;
#endif
#undef E2M1_TABLE
}

// Codes of 5 and 6 bits: lines of 4-bit codes have their low bits, and after every kShared lines one has their high bits:
// bits kHigh * f .. of byte j belong to byte j of step f (of four columns).
template <Format F>
constexpr int kHigh = F == Format::int5   ? 1
                      : F == Format::int6 ? 2
                                          : 0;
template <Format F>
constexpr int kShared = F == Format::int5   ? 4
                        : F == Format::int6 ? 2
                                            : 0;

// Bytes of `lines` lines, whole runs of kShared.
template <Format F>
constexpr int64_t line_bytes(int64_t lines) {
  return kShared<F> ? (lines + lines / kShared<F>)*64 : lines * 64;
}

// Line `line` of those at `from`; high: the high bits of its codes, if they are separate, of step 0 lowest.
struct Line {
  W low, high;
};
template <Format F>
inline Line load(const uint8_t* from, int64_t line) {
  Line l;
  if constexpr (kShared<F> == 0) {
    l.low = lin::load_line(from + line * 64);
  } else {
    const int64_t run = line / kShared<F>, in = line % kShared<F>;
    from += run * (kShared<F> + 1) * 64;
    l.low = lin::load_line(from + in * 64);
    l.high = lin::load_line(from + kShared<F> * 64);
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i) l.high.p[i] = l.high.p[i] >> uint32_t(2 * in * kHigh<F>);
  }
  return l;
}

// Four unsigned bytes of each row: columns 4 s .. of a line.
template <Format F>
inline gm::vu step_bytes(const Line& line, int s, int i) {
  if constexpr (lin::kBits<F> == 8) return line.low.p[i];
  const gm::vu low = (line.low.p[i] >> (4 * s)) & 0x0f0f0f0fu;
  if constexpr (kHigh<F> == 0) return low;
  constexpr uint32_t mask = kHigh<F> == 1 ? 0x01010101u : 0x03030303u;
  return low | ((line.high.p[i] >> (kHigh<F> * s)) & mask) << 4;
}

// Four columns per step: unsigned bytes by int8.
struct Dot4 {
  static constexpr int kColumns = 4;
  static constexpr bool kExact = !GM_DOT4_INT16;  // accumulators are int32
  template <Format F>
  static constexpr int kSteps = lin::kBits<F> == 4 ? 2 : 1;  // steps of a line
  // Lines whose sums fit an accumulator: 8 * 15 * 127 * 2 = 30,480, and 4 * 24 * 127 * 2 = 24,384.
  template <Format F>
  static constexpr int kRun = F == Format::e2m1 ? 2 : 4;

  template <Format F>
  static inline Int decode(const Line& line, int s) {
    Int step;
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i) {
      step.p[i] = (gm::vi)step_bytes<F>(line, s, i);
      if constexpr (F == Format::e2m1) step.p[i] = e2m1_codes(step.p[i]);
    }
    return step;
  }
  static inline void mac(Int& acc, const Int& w, uint32_t x) {
    const gm::vi v = gm::vi{} + int32_t(x);
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i) {
#if GM_DOT4_INT16
      acc.p[i] = add_int16(acc.p[i], maddubs(w.p[i], v));
      in_order(acc.p[i]);
#else
      acc.p[i] = dot4(acc.p[i], w.p[i], v);
#endif
    }
  }
  // sums += the accumulator's halves
  static inline void widen(Int& sums, const Int& acc) {
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i) sums.p[i] += widened(acc.p[i]);
  }
  // The halves of each lane, added.
  static inline gm::vi widened(gm::vi acc) { return dot2(acc, gm::vi{} + 0x00010001); }
};

// Two columns per step: codes of more than 4 bits by int8, both as int16.
struct Dot2 {
  static constexpr int kColumns = 2;
  static constexpr bool kExact = true;
  template <Format F>
  static constexpr int kSteps = 16 / lin::kBits<F>;
  template <Format F>
  static constexpr int kRun = 1;

  // Columns (0, 2) of four, then (1, 3).
  template <Format F>
  static inline Int decode(const Line& line, int s) {
    Int step;
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i)
      step.p[i] = (gm::vi)((step_bytes<F>(line, s / 2, i) >> (8 * (s % 2))) & 0x00ff00ffu);
    return step;
  }
  static inline void mac(Int& acc, const Int& w, uint32_t x) {
    const gm::vi v = gm::vi{} + int32_t(x);
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i) {
      acc.p[i] += dot2(w.p[i], v);
      in_order(acc.p[i]);
    }
  }
};

template <Format F, bool kBytes>
struct MathOf {
  using type = Dot4;
};
template <>
struct MathOf<Format::int8, false> {
  using type = Dot2;
};
template <>
struct MathOf<Format::int5, false> {
  using type = Dot2;
};
template <>
struct MathOf<Format::int6, false> {
  using type = Dot2;
};
template <Format F>
using Math = typename MathOf<F, Dot4::kExact>::type;

// int8 scales that multiply sums as integers, as ggml's products of K-quants do: each scale twice where accumulators are
// pairs of int16, so that one pmaddwd adds and scales the pair; as floats elsewhere. Both give the product rounded once,
// since sums are below 2^24. Returned as the bits of a float vector.
template <class M>
inline gm::vf integer_scales(const int8_t* from) {
  if constexpr (M::kExact) return lin::load_i8(from);
#if GM_X86_AVX2 && !GM_X86_AVX512
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return (gm::vf)_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(bytes, bytes));
#else
  const gm::vi v = __builtin_convertvector(lin::load_i8(from), gm::vi);
  return (gm::vf)((v << 16) | (v & 0xffff));
#endif
}
template <class M>
inline gm::vf integer_scaled(gm::vi acc, gm::vf scales) {
  if constexpr (M::kExact)
    return __builtin_convertvector(acc, gm::vf) * scales;
  else
    return __builtin_convertvector(dot2(acc, (gm::vi)scales), gm::vf);
}

// int8 codes of a row -> the 32-bit words of its steps, `gap` words apart.
template <class M>
inline void step_words(const int8_t* codes, int64_t columns, uint32_t* words, int64_t gap) {
  if constexpr (M::kColumns == 4) {
    for (int64_t s = 0; s < columns / 4; ++s) std::memcpy(words + s * gap, codes + 4 * s, 4);
  } else {
    for (int64_t s = 0; s < columns / 2; ++s) {  // columns (0, 2) and (1, 3) of a line: see Dot2::decode
      const int64_t c = s / 2 * 4 + s % 2;
      words[s * gap] = uint32_t(uint16_t(codes[c])) | uint32_t(uint16_t(codes[c + 2])) << 16;
    }
  }
}

}  // namespace a8
}  // namespace
