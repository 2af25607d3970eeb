// Values for the sanitizer programs: storage types to float and back without the kernels' own conversions, and
// cheap repeatable numbers.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

// Dtype codes of kernels/_native/gm_cpu.h.
template <int Code>
struct Dtype;
template <>
struct Dtype<0> {
  using T = float;
  static constexpr double kEps = 6e-8;
  static T put(float v) { return v; }
  static float get(T v) { return v; }
};
template <>
struct Dtype<1> {  // float16; put takes normal values that it holds exactly, 0 and NaN
  using T = uint16_t;
  static constexpr double kEps = 4.9e-4;
  static T put(float v) {
    if (v == 0 || v != v) return v == 0 ? 0 : 0x7e00;
    int exponent;
    const float part = std::frexp(std::fabs(v), &exponent);  // [0.5, 1)
    return T((v < 0 ? 0x8000 : 0) | (exponent + 14) << 10 | (int(part * 2048) & 0x3ff));
  }
  static float get(T v) {
    const int exponent = v >> 10 & 31, mantissa = v & 0x3ff;
    const float size = exponent == 31 ? (mantissa ? NAN : INFINITY)
                       : exponent     ? std::ldexp(float(mantissa | 0x400), exponent - 25)
                                      : std::ldexp(float(mantissa), -24);
    return v & 0x8000 ? -size : size;
  }
};
template <>
struct Dtype<2> {  // bfloat16; put takes normal values that it holds exactly, 0 and NaN
  using T = uint16_t;
  static constexpr double kEps = 3.91e-3;
  static T put(float v) {
    uint32_t u;
    std::memcpy(&u, &v, 4);
    return T(u >> 16);
  }
  static float get(T v) {
    const uint32_t u = uint32_t(v) << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
  }
};

inline float e4m3(uint8_t v) {
  const int exponent = v >> 3 & 15, mantissa = v & 7;
  const float size =
      exponent ? std::ldexp(float(mantissa | 8), exponent - 10) : std::ldexp(float(mantissa), -9);
  return v & 0x80 ? -size : size;
}
template <>
struct Dtype<3> {  // e4m3; put takes values that it holds exactly, and NaN
  using T = uint8_t;
  static T put(float v) {
    int code = 0;
    while (code < 0x7f && e4m3(T(code)) != std::fabs(v)) ++code;
    return T(code | (v < 0 ? 0x80 : 0));
  }
  static float get(T v) { return e4m3(v); }
};

// xorshift64*: the same numbers in every run.
class Numbers {
 public:
  uint32_t word() {
    state_ ^= state_ >> 12, state_ ^= state_ << 25, state_ ^= state_ >> 27;
    return uint32_t(state_ * 2685821657736338717ull >> 32);
  }
  int64_t below(int64_t n) { return word() % n; }
  float eighths() { return float(below(33) - 16) / 8; }  // -2 to 2 in eighths: exact in every storage type

 private:
  uint64_t state_ = 88172645463325252ull;
};
