// A thread's weights of scores under a small cap, as _flash_sm90.cuh makes them, for test_bounded_weights.py.
#include "attention_fibers.h"

#include "../../kernels/attention/sm90/_bounded_weights_sm90.cuh"

// scores: [N] of a thread, in the order of its accumulators. begins, ends: as of mask_scores. weights: [N / 2] pairs in bf16; sums: of
// both rows, of the weights and of the rounded ones. Returns some_of the inverses.
template <int N>
float thread(float cap, float scale, bool masked, const float* scores, const int* begins, const int* ends,
             uint32_t* weights, float* sums) {
  const gm::SoftCap<true> soft = gm::soft_cap(cap, scale);
  float s[N], l[2] = {}, rounded[2] = {};
  uint32_t words[N / 8][4];
  std::memcpy(s, scores, sizeof s);
  const int first[2] = {begins[0], begins[1]}, last[2] = {ends[0], ends[1]};
  if (masked) gm::mask_scores(s, first, last, 0.f);
  soft.to_inverses(s);
  if (masked) gm::mask_scores(s, first, last, INFINITY);
  const float some = gm::some_of(s);
  gm::bounded_weights(s, soft, l, rounded, words);
  std::memcpy(weights, words, sizeof words);
  sums[0] = l[0], sums[1] = l[1], sums[2] = rounded[0], sums[3] = rounded[1];
  return some;
}

extern "C" float weights_of_64(float cap, float scale, int masked, const float* scores, const int* begins,
                               const int* ends, uint32_t* weights, float* sums) {
  return thread<64>(cap, scale, masked, scores, begins, ends, weights, sums);
}
extern "C" float weights_of_32(float cap, float scale, int masked, const float* scores, const int* begins,
                               const int* ends, uint32_t* weights, float* sums) {
  return thread<32>(cap, scale, masked, scores, begins, ends, weights, sums);
}
extern "C" int is_small(float cap) { return gm::soft_cap(cap, 1.f).is_small(); }
