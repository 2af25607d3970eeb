// The soft cap of attention scores on Hopper: cap tanh(s / cap), as Gemma 2 has it.
#pragma once
#include <cmath>

#include "sm90/ptx.cuh"

namespace gm {

// SoftCap<false> is the identity. Capped scores are log2-scaled. in: factor from a score to the argument of tanh;
// out: cap log2(e); whole: the largest integer up to it.
template <bool CAP>
struct SoftCap;

template <>
struct SoftCap<false> {
#ifdef __CUDACC__
  static constexpr float in = 1.f;
  __device__ __forceinline__ float operator()(float score) const { return score; }
  static __device__ __forceinline__ bool is_small() { return true; }
#endif
};

template <>
struct SoftCap<true> {
  float in, out, whole;
#ifdef __CUDACC__
  // tanh x = 1 - 2 / (1 + 2^(2 log2(e) x)) or, near 0, where that cancels, the first terms of its series. The
  // relative error of both is below 2e-6. tanh.approx.f32 is one instruction, but its error of 5e-4 is 2.5 % of a
  // weight at a cap of 50.
  __device__ __forceinline__ float operator()(float score, float by) const {
    const float x = score * by, square = x * x;
    float series = fmaf(square, -17.f / 315, 2.f / 15);
    series = fmaf(square, series, -1.f / 3);
    series = fmaf(x * square, series, x);
    const float inverse = rcp_approx(1.f + exp2_approx(x * 2.885390081777927f));
    return (fabsf(x) < 0.3f ? series : fmaf(-2.f, inverse, 1.f)) * out;
  }
  __device__ __forceinline__ float operator()(float score) const { return (*this)(score, in); }
  // Whether the cap is at most 64: then the error of tanh without the series, some 4e-7, is 3e-5 of a capped score and of its
  // weight.
  __device__ __forceinline__ bool is_small() const { return out <= 64.f * 1.4426950408889634f; }
  // A thread's scores of two rows under a small cap, in 5 instructions each instead of 15. by: in the place of `in`, by row.
  template <int N>
  __device__ __forceinline__ void quickly(float (&s)[N], const float (&by)[2]) const {
    const float twice[2] = {by[0] * 2.885390081777927f, by[1] * 2.885390081777927f};
#pragma unroll
    for (int j = 0; j < N; ++j)
      s[j] = fmaf(-2.f * out, rcp_approx(1.f + exp2_approx(s[j] * twice[j >> 1 & 1])), out);
  }
  // Replaces a thread's scores of two rows under a small cap by 1 / (1 + 2^x), of which of_inverse makes the capped scores. Four of a
  // row share a reciprocal, 1 / a = b / (a b), for the special function units, with 16 results per cycle, take longest of all that a
  // score takes. 2^30, where tanh has long been 1, is the largest power: the product of four is a number. A score that is none makes
  // the others of its four none, too.
  template <int N>
  __device__ __forceinline__ void to_inverses(float (&s)[N]) const {
    const float less = in * -2.885390081777927f;
    constexpr int kStep = 32;  // scores that are on their way at a time
#pragma unroll
    for (int j = 0; j < N; j += kStep) {
      float e[kStep], inverse[kStep / 4];
#pragma unroll
      for (int i = 0; i < kStep; ++i) e[i] = exp2_approx(-fmax_nan(s[j + i] * less, -30.f));
      // Rows are pairs in turn: the four of a row are 0, 1, 4, 5 or 2, 3, 6, 7.
#pragma unroll
      for (int q = 0; q < kStep / 4; ++q) {
        const int r = q / 2 * 8 + q % 2 * 2;
        const float b = 1.f + e[r + 1], d = 1.f + e[r + 5];
        s[j + r] = fmaf(e[r], b, b), s[j + r + 4] = fmaf(e[r + 4], d, d);
        inverse[q] = rcp_approx(s[j + r] * s[j + r + 4]);
      }
#pragma unroll
      for (int q = 0; q < kStep / 4; ++q) {
        const int r = q / 2 * 8 + q % 2 * 2;
        const float first = inverse[q] * s[j + r + 4], second = inverse[q] * s[j + r];
        s[j + r] = fmaf(first, e[r + 1], first), s[j + r + 1] = fmaf(first, e[r], first);
        s[j + r + 4] = fmaf(second, e[r + 5], second), s[j + r + 5] = fmaf(second, e[r + 4], second);
      }
    }
  }
  // The capped score of such an inverse, less the fraction of `out`; -inf of +inf. Then the weights of all scores near the cap lie just
  // below a power of two, where they are rounded least.
  __device__ __forceinline__ float of_inverse(float inverse) const {
    return fmaf(-2.f * out, inverse, whole);
  }
  __device__ __forceinline__ float fraction() const { return out - whole; }
#endif
};

// scale: of the scores; 0 if they are log2-scaled already.
inline SoftCap<true> soft_cap(float cap, float scale) {
  const float out = cap * 1.4426950408889634f;
  return {(scale > 0.f ? scale : 0.6931471805599453f) / cap, out, std::floor(out)};
}

}  // namespace gm
