// gm_grouped_topk under the sanitizers: one expert and many, odd widths, groups, bias, NaN, strides, every
// dtype and level.
//
// Planted faults that this program was seen to catch: the last vector of logits read whole in `scores_of`,
// the bias read one past its end, ids written at top_k + 1 a row.
#include "asan.h"
#include "asan_values.h"
#include "calls/grouped_topk.h"

#include <vector>

GM_LEVELS(gm_grouped_topk, (const GmGroupedTopkCall&));
struct Call {  // by position
  decltype(gm_grouped_topk_levels[0].call) entry;
  int operator()(const void* logits, int64_t stride, const float* bias, float* weights, int32_t* ids,
                 int64_t m, int64_t e, int64_t top_k, int64_t n_group, int64_t topk_group, bool sigmoid,
                 int renormalize, float scale, int type) const {
    const GmGroupedTopkCall call{
        .logits = logits,
        .logits_stride = {stride},
        .top_k = top_k,
        .bias = bias,
        .n_group = n_group,
        .topk_group = topk_group,
        .scoring = sigmoid ? GmGroupedTopkCall::Scoring::sigmoid : GmGroupedTopkCall::Scoring::softmax,
        .renormalize = renormalize,
        .scale = scale,
        .weights = weights,
        .ids = ids,
        .m = m,
        .e = e,
        .x_type = type};
    return entry(call);
  }
};

template <class D>
void run(Call call, int dtype, int64_t rows, int64_t experts, int64_t groups, int64_t kept, int64_t top_k,
         bool sigmoid, bool biased) {
  using T = typename D::T;
  Numbers numbers;
  Buffer<T> logits(rows, experts, experts + 5);
  Buffer<float> bias(biased ? experts : 0), weights(rows * top_k);
  Buffer<int32_t> ids(rows * top_k);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t e = 0; e < experts; ++e) logits(r, e) = D::put(numbers.eighths());
  for (int64_t e = 0; biased && e < experts; ++e) bias.data()[e] = numbers.eighths() / 8;
  if (rows > 2) logits(2, experts / 2) = D::put(NAN);
  CHECK(call(logits.data(), experts + 5, biased ? bias.data() : nullptr, weights.data(), ids.data(), rows,
             experts, top_k, groups, kept, sigmoid, 1, 2.0f, dtype) == 0);
  for (int64_t r = 0; r < rows; ++r) {
    std::vector<bool> seen(experts), group(groups);
    double total = 0;
    bool lost = false;
    for (int64_t i = 0; i < top_k; ++i) {
      const int32_t id = ids.data()[r * top_k + i];
      CHECK(id >= 0 && id < experts && !seen[id]);
      seen[id] = group[id / (experts / groups)] = true;
      total += weights.data()[r * top_k + i];
      lost |= weights.data()[r * top_k + i] != weights.data()[r * top_k + i];
    }
    int64_t used = 0;
    for (int64_t g = 0; g < groups; ++g) used += group[g];
    CHECK(used <= kept);
    if (r == 2) continue;
    CHECK(!lost && std::fabs(total - 2) < 1e-4);
    if (!biased && kept == groups)  // then it is a plain top-k of the logits
      for (int64_t e = 0; e < experts; ++e)
        for (int64_t i = 0; i < top_k && !seen[e]; ++i)
          CHECK(D::get(logits(r, e)) <= D::get(logits(r, ids.data()[r * top_k + i])));
  }
}

template <class D>
void all(Call call, int dtype) {
  for (const bool sigmoid : {false, true})
    for (const bool biased : {false, true}) {
      for (const int64_t experts : {1, 3, 7, 16, 17, 60, 257}) {
        run<D>(call, dtype, 4, experts, 1, 1, 1, sigmoid, biased);
        run<D>(call, dtype, 1, experts, 1, 1, experts, sigmoid, biased);
        run<D>(call, dtype, 4, experts, experts, (experts + 1) / 2, (experts + 1) / 2, sigmoid,
               biased);  // groups of one
      }
      run<D>(call, dtype, 5, 256, 8, 4, 8, sigmoid, biased);
      run<D>(call, dtype, 3, 4096, 16, 3, 9, sigmoid, biased);
      run<D>(call, dtype, 0, 8, 1, 1, 2, sigmoid, biased);
    }
  const auto refused = [&](int64_t experts, int64_t top_k, int64_t groups, int64_t kept) {
    return call(nullptr, 0, nullptr, nullptr, nullptr, 1, experts, top_k, groups, kept, 0, 0, 1.0f, dtype);
  };
  for (const int code : {refused(0, 1, 1, 1), refused(4097, 1, 1, 1), refused(8, 9, 1, 1),
                         refused(8, 0, 1, 1), refused(8, 1, 3, 1), refused(8, 1, 2, 3), refused(8, 5, 2, 1)})
    CHECK(code == -2);
}

int main() {
  int ran = 0;
  for (const auto& level : gm_grouped_topk_levels) {
    if (level.call == nullptr || !runs_here(level.name)) continue;
    all<Dtype<0>>(Call{level.call}, 0);
    all<Dtype<1>>(Call{level.call}, 1);
    all<Dtype<2>>(Call{level.call}, 2);
    CHECK(Call{level.call}(nullptr, 0, nullptr, nullptr, nullptr, 0, 8, 1, 1, 1, 0, 0, 1.0f, 99) == -1);
    ++ran;
  }
  CHECK(ran > 0);
  std::printf("grouped_topk: %d level(s)\n", ran);
}
