// Merges two partial attentions by their log-sum-exps: out = (e^p A + e^q B) / (e^p + e^q), lse = ln(e^p + e^q).
#include <cmath>

#include "calls/merge_attention_states.h"
#include "gm_cpu.h"

namespace {

template <class T>
void merge_row(const T* a, float p, const T* b, float q, T* out, float* lse, int64_t size) {
  constexpr int L = gm::kLanes;
  const float none = -__builtin_inff();
  const float larger = p > q ? p : q;
  const float m_i = p != p || q != q ? p + q : larger == none ? 0.0f : larger;  // NaN stays NaN
  const float wa = ::expf(p - m_i), wb = ::expf(q - m_i), l_i = wa + wb;
  *lse = m_i + ::logf(l_i);
  const float scale = l_i == 0.0f ? 1.0f : l_i;
  const bool use_a = p != none,
             use_b = q != none;  // an empty partial is not read, since it may be uninitialized
  for (int64_t c = 0; c < size; c += L) {
    const int64_t n = size - c;
    gm::vf sum = gm::zero();
    if (use_a) sum = sum + (n >= L ? gm::load(a + c) : gm::load(a + c, n)) * wa;
    if (use_b) sum = sum + (n >= L ? gm::load(b + c) : gm::load(b + c, n)) * wb;
    if (n >= L) {
      gm::store(out + c, sum / scale);
    } else {
      gm::store(out + c, sum / scale, n);
    }
  }
}

}  // namespace

// out may be a or b.
GM_CPU_CALL(gm_merge_attention_states, MergeAttentionStates)(const GmMergeAttentionStatesCall& call) {
  if (call.t < 0 || call.h < 0 || call.d < 1) return GM_E_SHAPE;
  GM_DISPATCH_FLOAT(call.x_type, T, {
    const int64_t grain = 16384 / call.d + 1;
    return gm::parallel_for(call.t * call.h, grain, [&](int64_t begin, int64_t end) {
      const int64_t d = call.d;
      for (int64_t r = begin; r < end; ++r)
        merge_row(static_cast<const T*>(call.a) + r * d, static_cast<const float*>(call.a_lse)[r],
                  static_cast<const T*>(call.b) + r * d, static_cast<const float*>(call.b_lse)[r],
                  static_cast<T*>(call.out) + r * d, static_cast<float*>(call.lse) + r, d);
    });
  })
}
