// Grouped top-k of a router's logits, DeepSeek-V3 (arXiv 2412.19437).
// The meaning, ties and NaN included, is in op.py.
// gm-levels: base avx2 avx512 neon
#include "calls/grouped_topk.h"
#include "gm_cpu.h"

namespace {

constexpr int kMaxExperts = 4096;

// Sort key: the order of the float in the high word, the lower index first among equals. Never 0.
inline uint64_t key_of(float v, int64_t index) {
  if (!(v == v)) v = -__builtin_inff();
  if (v == 0.0f) v = 0.0f;  // -0 and 0 are equal
  const uint32_t bits = gm::bit_cast<uint32_t>(v);
  const uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return (uint64_t(ordered) << 32) | uint32_t(~uint32_t(index));
}
inline int64_t index_of(uint64_t key) { return int64_t(~uint32_t(key)); }

template <class T>
void scores_of(const T* logits, float* scores, int64_t experts, bool sigmoid) {
  constexpr int L = gm::kLanes;
  auto part = [&](int64_t c) {
    return c + L <= experts ? gm::load(logits + c) : gm::load(logits + c, experts - c);
  };
  auto keep = [&](int64_t c, gm::vf v) {
    if (c + L <= experts)
      gm::store(scores + c, v);
    else
      gm::store(scores + c, v, experts - c);
  };
  if (sigmoid) {
    for (int64_t c = 0; c < experts; c += L) keep(c, 1.0f / (1.0f + gm::exp(-part(c))));
    return;
  }
  float top = -__builtin_inff();
  for (int64_t c = 0; c < experts; ++c) {
    const float v = gm::to_float(logits[c]);
    top = v > top || v != v ? v : top;  // a NaN stays
  }
  for (int64_t c = 0; c < experts; c += L) keep(c, gm::exp(part(c) - top));
  double total = 0;
  for (int64_t c = 0; c < experts; ++c) total += scores[c];
  for (int64_t c = 0; c < experts; ++c) scores[c] = float(scores[c] / total);
}

// Selects the largest `count` keys of keys[0, n), in order, and zeros them.
void select_largest(uint64_t* keys, int64_t n, int64_t count, int32_t* out) {
  for (int64_t k = 0; k < count; ++k) {
    uint64_t best = keys[0];
    for (int64_t i = 1; i < n; ++i) best = keys[i] > best ? keys[i] : best;
    out[k] = int32_t(index_of(best));
    keys[out[k]] = 0;
  }
}

template <class T>
void row(const T* logits, const float* bias, float* weights, int32_t* ids, int64_t experts, int64_t top_k,
         int64_t groups, int64_t kept, bool sigmoid, bool renormalize, float scale) {
  float scores[kMaxExperts];
  uint64_t keys[kMaxExperts];
  scores_of(logits, scores, experts, sigmoid);
  auto choice = [&](int64_t e) { return bias ? scores[e] + bias[e] : scores[e]; };
  if (kept < groups) {
    int32_t chosen[kMaxExperts];
    const int64_t size = experts / groups;
    for (int64_t g = 0; g < groups; ++g) {
      float first = -__builtin_inff(), second = -__builtin_inff();
      for (int64_t e = g * size; e < (g + 1) * size; ++e) {
        const float v = choice(e);
        if (v > first) {
          second = first;
          first = v;
        } else if (v > second) {
          second = v;
        }
      }
      keys[g] = key_of(bias && size > 1 ? first + second : first, g);
    }
    select_largest(keys, groups, kept, chosen);
    for (int64_t e = 0; e < experts; ++e) keys[e] = 0;
    for (int64_t j = 0; j < kept; ++j)
      for (int64_t e = chosen[j] * size; e < (chosen[j] + 1) * size; ++e) keys[e] = key_of(choice(e), e);
  } else {
    for (int64_t e = 0; e < experts; ++e) keys[e] = key_of(choice(e), e);
  }
  select_largest(keys, experts, top_k, ids);
  float total = 0;
  for (int64_t k = 0; k < top_k; ++k) {
    weights[k] = scores[ids[k]];
    total += weights[k];
  }
  const float divisor = renormalize ? total + 1e-20f : 1.0f;
  for (int64_t k = 0; k < top_k; ++k) weights[k] = weights[k] / divisor * scale;
}

}  // namespace

GM_CPU_CALL(gm_grouped_topk, GroupedTopk)(const GmGroupedTopkCall& call) {
  if (call.m < 0 || call.e < 1 || call.e > kMaxExperts || call.n_group < 1 || call.e % call.n_group ||
      call.topk_group < 1 || call.topk_group > call.n_group || call.top_k < 1 ||
      call.top_k > call.e / call.n_group * call.topk_group)
    return GM_E_SHAPE;
  GM_DISPATCH_FLOAT(call.x_type, T, {
    return gm::parallel_for(call.m, 8, [&](int64_t begin, int64_t end) {
      const bool sigmoid = call.scoring == GmGroupedTopkCall::Scoring::sigmoid;
      for (int64_t r = begin; r < end; ++r)
        row(static_cast<const T*>(call.logits) + r * call.logits_stride[0],
            static_cast<const float*>(call.bias), static_cast<float*>(call.weights) + r * call.top_k,
            static_cast<int32_t*>(call.ids) + r * call.top_k, call.e, call.top_k, call.n_group,
            call.topk_group, sigmoid, call.renormalize != 0, float(call.scale));
    });
  })
}
