// Shared header of the C++ CPU kernels.
//
// A kernel is one source, kernels/<family>/_<op>_cpu.cpp. CMake finds it by name and compiles it once per ISA level into
// _lib/libgristmill_cpu.so. Adding one edits no other file. Pattern:
//
//   #include "gm_cpu.h"  // found without a path
//   #include "calls/my_op.h"  // the struct of its calls, which `make generate` writes
//   namespace {  // everything but the entry has internal linkage: one copy per level
//   template <class T>
//   void twice(const T* x, T* y, int64_t n) {
//     int64_t i = 0;
//     for (; i + gm::kLanes <= n; i += gm::kLanes) gm::store(y + i, 2.0f * gm::load(x + i));
//     if (i < n) gm::store(y + i, 2.0f * gm::load(x + i, n - i), n - i);
//   }
//   }  // namespace
//   GM_CPU_CALL(gm_my_op, MyOp)(const GmMyOpCall& call) {  // int gm_my_op__<level>(...)
//     GM_DISPATCH_FLOAT(call.x_type, T, {  // T = float, gm::f16 or gm::bf16; GM_E_DTYPE for another dtype
//       return gm::parallel_for(call.n, /*grain*/ 4096, [&](int64_t begin, int64_t end) {
//         twice(static_cast<const T*>(call.x) + begin, static_cast<T*>(call.y) + begin, end - begin);
//       });
//     })
//   }
//
// and in Python, with kernels/native_call.py:
//
//   CallEntry("gm_my_op", "my_op").cpu(config, call)
//
// Rules. Entries return 0 or a negative code, and never throw (compiled
// with -fno-exceptions -fno-rtti). Strides are in elements. Shapes are checked in Python; an entry re-checks
// only what would make it write out of bounds. No std:: containers or algorithms here: an inline STL template
// instantiated with AVX-512 could be the copy that the linker keeps for base code. <cstdint>, <cstring>,
// <cmath> scalars and malloc/free are fine. -ffp-contract=off: write fma() where it is meant, so that results
// of a level do not depend on the compiler.
//
// Level macros for intrinsics: GM_X86_AVX2, GM_X86_AVX512, GM_X86_VNNI, GM_X86_BF16, GM_X86_AMX, GM_ARM_NEON,
// GM_ARM_DOTPROD, GM_ARM_I8MM, GM_ARM_SVE are 0 or 1. A kernel that gains nothing from some levels names those to build in
// one line of its source:
//   // gm-levels: base avx2 avx512 neon
// (default: every level that the compiler can build, except amx, which must be named). Asking Python for a
// level that was not built raises; native.best_level(name, level) finds the highest one built at or below it.
#pragma once
#include <cstdint>
#include <cstring>

#include "call_list.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef GM_LEVEL
#error "GM_LEVEL is set by CMake, for example -DGM_LEVEL=avx2"
#endif

#ifdef __AVX2__
#define GM_X86_AVX2 1
#else
#define GM_X86_AVX2 0
#endif
#ifdef __AVX512BW__
#define GM_X86_AVX512 1
#else
#define GM_X86_AVX512 0
#endif
#ifdef __AVX512VNNI__
#define GM_X86_VNNI 1
#else
#define GM_X86_VNNI 0
#endif
#ifdef __AVX512BF16__
#define GM_X86_BF16 1
#else
#define GM_X86_BF16 0
#endif
#ifdef __AMX_TILE__
#define GM_X86_AMX 1
#else
#define GM_X86_AMX 0
#endif
#ifdef __aarch64__
#define GM_ARM_NEON 1
#else
#define GM_ARM_NEON 0
#endif
#ifdef __ARM_FEATURE_DOTPROD
#define GM_ARM_DOTPROD 1
#else
#define GM_ARM_DOTPROD 0
#endif
#ifdef __ARM_FEATURE_MATMUL_INT8
#define GM_ARM_I8MM 1
#else
#define GM_ARM_I8MM 0
#endif
#ifdef __ARM_FEATURE_SVE
#define GM_ARM_SVE 1
#else
#define GM_ARM_SVE 0
#endif

#define GM_CAT2(a, b) a##__##b
#define GM_CAT(a, b) GM_CAT2(a, b)
#define GM_KERNEL(name) extern "C" __attribute__((visibility("default"))) int GM_CAT(name, GM_LEVEL)
// GM_CPU_CALL(gm_rms_norm, RmsNorm)(const GmRmsNormCall& call): an entry that takes the struct of
// "calls/rms_norm.h", whose digest is compared with that of the declaration when the entry is first looked up
// (kernels/native_call.py). With names after the operation, GM_CPU_CALL(gm_linear_rows16, Linear, format,
// group), the entry has a second parameter, const gm_linear_rows16_options&: int64_t of these names, out of the
// configuration. Before it runs, the entry notes the call for a thread that records (call_list.h).
#define GM_NONE_OR(...) GM_FIRST_TWO(__VA_ARGS__ __VA_OPT__(, ) nullptr, 0)
#define GM_FIRST_TWO(a, b, ...) a, b
#define GM_CPU_CALL(name, Op, ...)                                                                      \
  struct name##_options {                                                                               \
    __VA_OPT__(int64_t __VA_ARGS__;)                                                                    \
  };                                                                                                    \
  extern "C" __attribute__((visibility("default"))) uint64_t GM_CAT(call_of_##name, GM_LEVEL)() {       \
    return Gm##Op##Call::kDigest;                                                                       \
  }                                                                                                     \
  extern "C" __attribute__((visibility("default"))) const char* GM_CAT(options_of_##name, GM_LEVEL)() { \
    return #__VA_ARGS__;                                                                                \
  }                                                                                                     \
  static int name##_run(const Gm##Op##Call& __VA_OPT__(, const name##_options&));                       \
  static int name##_replay(const void* call, [[maybe_unused]] const void* options) {                    \
    return name##_run(*static_cast<const Gm##Op##Call*>(call)                                           \
                          __VA_OPT__(, *static_cast<const name##_options*>(options)));                  \
  }                                                                                                     \
  GM_KERNEL(name)(const Gm##Op##Call& call __VA_OPT__(, const name##_options& options)) {               \
    gm_note_call(name##_replay, &call, sizeof call, GM_NONE_OR(__VA_OPT__(&options, sizeof options)));  \
    return name##_run(call __VA_OPT__(, options));                                                      \
  }                                                                                                     \
  static int name##_run

// GM_CPU_ARGS(gm_my_op, GmMyArgs)(const GmMyArgs& args): an entry that takes the struct of an args.h, which `make
// generate` writes from args.py (quant/argument_struct.py); checked like that of a call.
#define GM_CPU_ARGS(name, Struct)                                                                 \
  extern "C" __attribute__((visibility("default"))) uint64_t GM_CAT(args_of_##name, GM_LEVEL)() { \
    return Struct::kDigest;                                                                       \
  }                                                                                               \
  GM_KERNEL(name)

// Codes shared with kernels/native.py.
enum : int {
  GM_F32 = 0,
  GM_F16 = 1,
  GM_BF16 = 2,
  GM_F8E4M3 = 3,
  GM_F8E5M2 = 4,
  GM_I8 = 5,
  GM_U8 = 6,
  GM_I32 = 7,
  GM_I64 = 8
};
enum : int { GM_OK = 0, GM_E_DTYPE = -1, GM_E_SHAPE = -2, GM_E_NOMEM = -3, GM_E_THREADS = -4, GM_E_ARG = -5 };

// kernels/_native/threads.cpp; the sanitizer drivers link a serial stub in its place.
extern "C" int gm_parallel_raw(int64_t n, int64_t grain, void (*body)(int64_t, int64_t, void*),
                               void* context);
extern "C" int gm_num_threads();

#define GM_DISPATCH_FLOAT(code, T, ...) \
  switch (code) {                       \
    case GM_F32: {                      \
      using T = float;                  \
      __VA_ARGS__                       \
    } break;                            \
    case GM_F16: {                      \
      using T = gm::f16;                \
      __VA_ARGS__                       \
    } break;                            \
    case GM_BF16: {                     \
      using T = gm::bf16;               \
      __VA_ARGS__                       \
    } break;                            \
    default:                            \
      return GM_E_DTYPE;                \
  }

namespace gm {
namespace {  // internal linkage: each level has its own copy

constexpr int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

constexpr int64_t item_bytes(int64_t type) {
  return type == GM_I64                      ? 8
         : type == GM_F32 || type == GM_I32  ? 4
         : type == GM_F16 || type == GM_BF16 ? 2
                                             : 1;
}

// Storage types. They are distinct from uint16_t so that overloads choose the conversion.
struct f16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};
struct f8e4m3 {
  uint8_t bits;
};

template <class To, class From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

// ---- scalar conversions, round to nearest, ties to even; NaN stays NaN
// -------------------------------------------------

inline float to_float(float v) { return v; }
inline float to_float(bf16 v) { return bit_cast<float>(uint32_t(v.bits) << 16); }
inline float to_float(f16 v) {
#if defined(__F16C__)
  return _cvtsh_ss(v.bits);
#elif defined(__aarch64__)
  return float(bit_cast<__fp16>(v.bits));
#else
  // Fabian Giesen's method: shift exponent and mantissa into float's fields and rescale by a multiplication (exact,
  // subnormals included).
  const uint32_t magnitude = uint32_t(v.bits & 0x7fffu) << 13;
  const float scaled = bit_cast<float>(magnitude) * bit_cast<float>(uint32_t(254 - 15) << 23);
  const uint32_t infnan = (v.bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
  return bit_cast<float>(bit_cast<uint32_t>(scaled) | infnan | (uint32_t(v.bits & 0x8000u) << 16));
#endif
}

template <class T>
inline T from_float(float v);
template <>
inline float from_float<float>(float v) {
  return v;
}
template <>
inline bf16 from_float<bf16>(float v) {
  const uint32_t u = bit_cast<uint32_t>(v);
  if ((u & 0x7fffffffu) > 0x7f800000u) return bf16{uint16_t((u >> 16) | 0x40u)};
  return bf16{uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}
template <>
inline f16 from_float<f16>(float v) {
#if defined(__F16C__)
  return f16{uint16_t(_cvtss_sh(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))};
#elif defined(__aarch64__)
  return f16{bit_cast<uint16_t>(__fp16(v))};
#else
  const uint32_t u = bit_cast<uint32_t>(v), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return f16{uint16_t(sign | 0x7e00u | ((a >> 13) & 0x3ffu))};
  if (a >= 0x477ff000u) return f16{uint16_t(sign | 0x7c00u)};  // >= 65520 rounds to infinity
  if (a < 0x38800000u) {  // subnormal in half: adding 0.5 makes the FPU round at half's last place
    const float r = bit_cast<float>(a) + 0.5f;
    return f16{uint16_t(sign | (bit_cast<uint32_t>(r) - 0x3f000000u))};
  }
  return f16{uint16_t(sign | ((a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13))};
#endif
}

// ---- vectors
// -----------------------------------------------------------------------------------------------------------
// GNU vector types: + - * / & | ^ << >> comparisons
// and `mask ? a : b` work lane by lane on every architecture.

#ifndef GM_LANES  // set by tests, to run the width of another level in plain vector arithmetic
#if GM_X86_AVX512
#define GM_LANES 16
#elif GM_X86_AVX2
#define GM_LANES 8
#else
#define GM_LANES 4
#endif
#endif
constexpr int kLanes = GM_LANES;
typedef float vf __attribute__((vector_size(4 * kLanes)));
typedef int32_t vi __attribute__((vector_size(4 * kLanes)));
typedef uint32_t vu __attribute__((vector_size(4 * kLanes)));
typedef uint16_t vh __attribute__((vector_size(2 * kLanes)));
typedef uint8_t vb __attribute__((vector_size(kLanes)));

inline vf splat(float v) { return v - vf{}; }  // v - 0 is v for every v; 0 + v is not for -0
inline vf zero() { return vf{}; }
inline vf max(vf a, vf b) { return a > b ? a : b; }
inline vf min(vf a, vf b) { return a < b ? a : b; }
inline vf abs(vf a) { return (vf)((vu)a & 0x7fffffffu); }

// a*b + c, rounded once where the level has FMA (all but x86 base).
inline vf fma(vf a, vf b, vf c) {
#if GM_X86_AVX512
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif GM_X86_AVX2
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif GM_ARM_NEON
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

inline vf sqrt(vf a) {
  for (int i = 0; i < kLanes; ++i) a[i] = __builtin_sqrtf(a[i]);
  return a;
}

// Zero-extends 16-bit lanes to 32 bits; and back, the low halves. (GCC 12 splits a __builtin_convertvector of 512 bits in
// two.)
inline vu extend(vh h) {
#if GM_X86_AVX512
  return (vu)_mm512_cvtepu16_epi32((__m256i)h);
#else
  return __builtin_convertvector(h, vu);
#endif
}
inline vh low_halves(vu v) {
#if GM_X86_AVX512
  return (vh)_mm512_cvtepi32_epi16((__m512i)v);
#else
  return __builtin_convertvector(v, vh);
#endif
}
inline vf widen(vh h, bf16) { return (vf)(extend(h) << 16); }
inline vf widen(vh h, f16) {
#if GM_X86_AVX512
  return (vf)_mm512_cvtph_ps((__m256i)h);
#elif GM_X86_AVX2
  return (vf)_mm256_cvtph_ps((__m128i)h);
#elif GM_ARM_NEON
  return (vf)vcvt_f32_f16((float16x4_t)h);
#else
  vf r;
  for (int i = 0; i < kLanes; ++i) r[i] = to_float(f16{uint16_t(h[i])});
  return r;
#endif
}
inline vh narrow(vf v, bf16) {
  const vu u = (vu)v;
  const vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const vu nan = (u >> 16) | 0x40u;
  return low_halves((u & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}
inline vh narrow(vf v, f16) {
#if GM_X86_AVX512
  return (vh)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif GM_X86_AVX2
  return (vh)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif GM_ARM_NEON
  return (vh)vcvt_f16_f32((float32x4_t)v);
#else
  vh r;
  for (int i = 0; i < kLanes; ++i) r[i] = from_float<f16>(v[i]).bits;
  return r;
#endif
}

// e4m3: the same bits as a float16 whose exponent is too small by 8,
// subnormals included; NaN is 0x7F and 0xFF.
inline vf widen(vb codes, f8e4m3) {
#if GM_X86_AVX512
  const vh code = (vh)_mm256_cvtepu8_epi16((__m128i)codes);
#elif GM_X86_AVX2
  const vh code = (vh)_mm_cvtepu8_epi16(_mm_cvtsi64_si128(bit_cast<int64_t>(codes)));
#else
  const vh code = __builtin_convertvector(codes, vh);
#endif
  const vh magnitude = code & 0x7f, nan = (vh)(magnitude == 0x7f) & 0x7c00;
  return widen(vh((magnitude << 7) | nan | ((code & 0x80) << 8)), f16{}) * 256.0f;
}
// To nearest, ties to even, saturated at 448; NaN is 0x7F.
inline vb narrow(vf v, f8e4m3) {
  const vu u = (vu)v, magnitude = u & 0x7fffffffu;
  const vu normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
  // Below 2^-6 codes are multiples of 2^-9, which is the last place of a float of 2^14.
  const vu subnormal = (vu)(abs(v) + 16384.0f) - 0x46800000u;
  vu code = magnitude < 0x3c800000u ? subnormal : normal;
  code = (code > 0x7eu ? vu{} + 0x7eu : code) | ((u >> 24) & 0x80u);
  code = magnitude > 0x7f800000u ? vu{} + 0x7fu : code;
#if GM_X86_AVX512
  return (vb)_mm512_cvtepi32_epi8((__m512i)code);
#else
  return __builtin_convertvector(code, vb);
#endif
}

// load(p) / store(p, v): kLanes elements at any alignment. load(p, n) / store(p, v, n): the first n < kLanes
// only; nothing past p[n-1] is touched, and missing lanes read as 0.
inline vf load(const float* p) {
  vf v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }
template <class H>
inline vf load(const H* p) {
  vh h;
  std::memcpy(&h, p, sizeof h);
  return widen(h, H{});
}
inline vf load(const f8e4m3* p) {
  vb codes;
  std::memcpy(&codes, p, sizeof codes);
  return widen(codes, f8e4m3{});
}
inline void store(f8e4m3* p, vf v) {
  const vb codes = narrow(v, f8e4m3{});
  std::memcpy(p, &codes, sizeof codes);
}
template <class H>
inline void store(H* p, vf v) {
  const vh h = narrow(v, H{});
  std::memcpy(p, &h, sizeof h);
}
template <class T>
inline vf load(const T* p, int64_t n) {
  T buffer[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) buffer[i] = p[i];
  return load(buffer);
}
template <class T>
inline void store(T* p, vf v, int64_t n) {
  T buffer[kLanes];
  store(buffer, v);
  for (int64_t i = 0; i < n; ++i) p[i] = buffer[i];
}

// Lane i of the result is lane i + half of v (i < half); the other lanes do not matter.
inline vf upper(vf v, int half) {
#if GM_LANES == 16
  if (half == 8)
    return __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15);
  if (half == 4) return __builtin_shufflevector(v, v, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7);
  if (half == 2) return __builtin_shufflevector(v, v, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3);
  return __builtin_shufflevector(v, v, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1);
#elif GM_LANES == 8
  if (half == 4) return __builtin_shufflevector(v, v, 4, 5, 6, 7, 4, 5, 6, 7);
  if (half == 2) return __builtin_shufflevector(v, v, 2, 3, 2, 3, 2, 3, 2, 3);
  return __builtin_shufflevector(v, v, 1, 1, 1, 1, 1, 1, 1, 1);
#else
  if (half == 2) return __builtin_shufflevector(v, v, 2, 3, 2, 3);
  return __builtin_shufflevector(v, v, 1, 1, 1, 1);
#endif
}

// Lanes are added in a fixed binary tree: the result depends on the level, never on threads, alignment or timing.
inline float sum(vf v) {
#pragma GCC unroll 4
  for (int half = kLanes / 2; half > 0; half /= 2) v = v + upper(v, half);
  return v[0];
}
inline float max(vf v) {
#pragma GCC unroll 4
  for (int half = kLanes / 2; half > 0; half /= 2) v = max(v, upper(v, half));
  return v[0];
}

// e^x, within 2 ulp for every float: x = n ln2 + r, |r| <= ln2/2, Taylor polynomial of degree 7 in r, scaled
// by 2^n in two steps so that subnormal results round properly. Over 88.73 gives +inf, under -104 gives 0,
// NaN stays NaN.
inline vf exp(vf x) {
  x = x < -104.0f ? splat(-104.0f) : x;  // a comparison with NaN is false: NaN passes through
  x = x > 89.0f ? splat(89.0f) : x;
  // 1.5 * 2^23: adding it rounds to an integer held in the low mantissa bits.
  const vf magic = splat(12582912.0f);
  const vf shifted = x * 1.44269504088896341f + magic;
  const vf n = shifted - magic;
  vf r = fma(n, splat(-0.693145751953125f), x);  // ln2 in two parts; n times the first is exact
  r = fma(n, splat(-1.42860682030941723212e-6f), r);
  vf p = splat(1.0f / 5040.0f);
  p = fma(p, r, splat(1.0f / 720.0f));
  p = fma(p, r, splat(1.0f / 120.0f));
  p = fma(p, r, splat(1.0f / 24.0f));
  p = fma(p, r, splat(1.0f / 6.0f));
  p = fma(p, r, splat(0.5f));
  p = fma(p * r, r, r) + 1.0f;
  const vi e = (vi)shifted - 0x4b400000;
  const vi e1 = e >> 1, e2 = e - e1;
  return p * (vf)((e1 + 127) << 23) * (vf)((e2 + 127) << 23);
}
inline float exp(float x) { return exp(splat(x))[0]; }

// x / (1 + e^-x)
inline vf silu(vf x) { return x / (1.0f + exp(-x)); }
inline float silu(float x) { return silu(splat(x))[0]; }

// ---- threads
// -----------------------------------------------------------------------------------------------------------
// Calls body(begin, end) over [0, n) on torch's thread pool, with at least `grain` items per call; serially within a
// parallel region. Returns GM_OK or GM_E_THREADS. The ranges depend on the number of threads: the result of an item must
// not depend on its range.
template <class Body>
inline int parallel_for(int64_t n, int64_t grain, const Body& body) {
  if (n <= 0) return GM_OK;
  return gm_parallel_raw(
      n, grain < 1 ? 1 : grain,
      [](int64_t begin, int64_t end, void* context) { (*static_cast<const Body*>(context))(begin, end); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace
}  // namespace gm
