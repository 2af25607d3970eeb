// The soft cap of attention scores on Hopper: cap tanh(s / cap), as Gemma 2 has it.
#pragma once
#include "sm90/ptx.cuh"

namespace gm {

// SoftCap<false> is the identity. Capped scores are log2-scaled. in: factor from a score to the argument of tanh;
// out: cap log2(e).
template <bool CAP>
struct SoftCap;

template <>
struct SoftCap<false> {
#ifdef __CUDACC__
  static constexpr float in = 1.f;
  __device__ __forceinline__ float operator()(float score) const { return score; }
#endif
};

template <>
struct SoftCap<true> {
  float in, out;
#ifdef __CUDACC__
  static constexpr float kNear = 1.f;
  // For |x| <= 1: x times a polynomial in x^2 whose coefficients make the largest relative error least (Remez's
  // algorithm), 7e-7.
  __device__ __forceinline__ static float tanh_near_zero(float x) {
    const float square = x * x;
    float series = fmaf(square, -3.126576225e-3f, 1.690640474e-2f);
    series = fmaf(square, series, -5.176828162e-2f);
    series = fmaf(square, series, 0.1328849012f);
    series = fmaf(square, series, -0.3333027965f);
    return fmaf(x * square, series, x);
  }
  // tanh x = 1 - 2 / (1 + 2^(2 log2(e) x)) beyond, where that does not cancel. The relative error is below 2e-6.
  // tanh.approx.f32 is one instruction, but its error of 5e-4 is 2.5 % of a weight at a cap of 50.
  __device__ __forceinline__ float operator()(float score, float by) const {
    const float x = score * by, near = tanh_near_zero(x);
    const float inverse = rcp_approx(1.f + exp2_approx(x * 2.885390081777927f));
    return (fabsf(x) <= kNear ? near : fmaf(-2.f, inverse, 1.f)) * out;
  }
  // The scores of two rows in turns of two, as the sums of a product have them: the same results, without two
  // instructions of the special function unit per score where all of a warp are small. By a whole warp.
  template <int N>
  __device__ __forceinline__ void all(float (&scores)[N], const float (&by)[2]) const {
    float top[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < N; ++i) top[i >> 1 & 1] = fmaxf(top[i >> 1 & 1], fabsf(scores[i]));
    if (__any_sync(0xffffffffu, top[0] * by[0] > kNear || top[1] * by[1] > kNear)) {
#pragma unroll
      for (int i = 0; i < N; ++i) scores[i] = (*this)(scores[i], by[i >> 1 & 1]);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) scores[i] = tanh_near_zero(scores[i] * by[i >> 1 & 1]) * out;
    }
  }
  __device__ __forceinline__ float operator()(float score) const { return (*this)(score, in); }
#endif
};

// scale: of the scores; 0 if they are log2-scaled already.
inline SoftCap<true> soft_cap(float cap, float scale) {
  return {(scale > 0.f ? scale : 0.6931471805599453f) / cap, cap * 1.4426950408889634f};
}

}  // namespace gm
