// Masks of scores on Hopper, and weights of scores that a small soft cap bounds: a thread's scores of a tile, of two rows.
#pragma once
#include "_soft_cap_sm90.cuh"

#ifdef __CUDACC__
namespace gm {

// Inverses of SoftCap::to_inverses -> weights 2^(score - fraction), in bf16. A small cap bounds the scores, so that weights and their
// sums are in the range of bf16 and float32 whatever a row's maximum is: none is looked for, and nothing is rescaled. l: row sums of the weights.
// rounded: of the weights in bf16, which divide the results: the largest weight, which is not 1, would be rounded as well.
template <int N, class Cap>
__device__ __forceinline__ void bounded_weights(const float (&s)[N], const Cap& cap, float (&l)[2],
                                                float (&rounded)[2], uint32_t (&weights)[N / 8][4]) {
#pragma unroll
  for (int j = 0; j < N / 2; ++j) {
    const float low = exp2_approx(cap.of_inverse(s[2 * j])), high = exp2_approx(cap.of_inverse(s[2 * j + 1]));
    const uint32_t both = packed<__nv_bfloat16>(low, high);
    l[j & 1] += low, l[j & 1] += high;
    rounded[j & 1] += __uint_as_float(both << 16), rounded[j & 1] += __uint_as_float(both & 0xffff0000u);
    weights[j >> 2][j & 3] = both;
  }
}

// A sum that depends on three quarters of the pairs of numbers.
template <int N>
__device__ __forceinline__ float some_of(const float (&s)[N]) {
  float sum[2] = {s[0], s[2]};
#pragma unroll
  for (int i = 4; i < N * 3 / 4; i += 2) sum[i >> 1 & 1] += s[i];
  return sum[0] + sum[1];
}

// Replaces the scores of keys before begins[r] and from ends[r] on, counted from this thread's first key, by `hidden`.
template <int N>
__device__ __forceinline__ void mask_scores(float (&s)[N], const int (&begins)[2], const int (&ends)[2],
                                            float hidden = -INFINITY) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int key = (i >> 2) * 8 + (i & 1), r = i >> 1 & 1;
    s[i] = key >= begins[r] && key < ends[r] ? s[i] : hidden;
  }
}

}  // namespace gm
#endif
