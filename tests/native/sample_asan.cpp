// gm_sample under the sanitizers: one token and odd vocabularies, every filter, NaN and infinities, ties,
// strides, every level; the filters' promises are checked, and that a row does not depend on the others.
//
// Planted faults that this program was seen to catch: the last vector of logits read whole in `row`, `padded`
// not rounding up, filter_top_p's items one short.
#include "asan.h"
#include "asan_values.h"
#include "calls/sample.h"

#include <algorithm>
#include <vector>

GM_LEVELS(gm_sample, (const GmSampleCall&));
struct Call {  // by position
  decltype(gm_sample_levels[0].call) entry;
  int operator()(const void* logits, int64_t stride, const float* temperature, const int32_t* top_k,
                 const float* top_p, const float* min_p, const int64_t* seed, const int64_t* index,
                 int64_t* ids, int64_t m, int64_t v, int type) const {
    const GmSampleCall call{.logits = logits,
                            .logits_stride = {stride},
                            .temperature = temperature,
                            .top_k = top_k,
                            .top_p = top_p,
                            .min_p = min_p,
                            .seed = seed,
                            .index = index,
                            .ids = ids,
                            .m = m,
                            .v = v,
                            .x_type = type};
    return entry(call);
  }
};

struct Filters {
  float temperature;
  int32_t top_k;
  float top_p, min_p;
};

template <class D>
void run(Call call, int dtype, int64_t rows, int64_t n, const Filters& f) {
  using T = typename D::T;
  Numbers numbers;
  Buffer<T> logits(rows, n, n + 3);
  Buffer<float> temperature(rows), top_p(rows), min_p(rows);
  Buffer<int32_t> top_k(rows);
  Buffer<int64_t> seed(rows), index(rows), ids(rows);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < n; ++i) logits(r, i) = D::put(numbers.eighths());
    temperature.data()[r] = f.temperature, top_k.data()[r] = f.top_k, top_p.data()[r] = f.top_p,
    min_p.data()[r] = f.min_p;
    seed.data()[r] = int64_t(numbers.word()) << 32 | numbers.word(), index.data()[r] = numbers.word();
  }
  if (rows > 1) logits(1, n - 1) = D::put(NAN);
  if (rows > 2)
    for (int64_t i = 0; i < n; ++i) logits(2, i) = D::put(-2.0f);  // all equal
  CHECK(call(logits.data(), n + 3, temperature.data(), top_k.data(), top_p.data(), min_p.data(), seed.data(),
             index.data(), ids.data(), rows, n, dtype) == 0);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t id = ids.data()[r];
    if (r == 1) {
      CHECK(id == -1);
      continue;
    }
    CHECK(id >= 0 && id < n);
    const float own = D::get(logits(r, id));
    std::vector<float> sorted;
    for (int64_t i = 0; i < n; ++i) sorted.push_back(D::get(logits(r, i)));
    std::sort(sorted.rbegin(), sorted.rend());
    if (f.temperature == 0) CHECK(own == sorted[0]);
    if (f.temperature > 0 && f.top_k > 0 && f.top_k <= n) CHECK(own >= sorted[f.top_k - 1]);
    if (f.temperature > 0 && f.min_p > 0)
      CHECK(std::exp((own - sorted[0]) / f.temperature) >= f.min_p * 0.9999);
    if (f.temperature > 0 && f.top_p <= 0.01f) CHECK(n > 2000 || own == sorted[0]);
    int64_t alone = -2;
    CHECK(call(&logits(r, 0), 0, temperature.data() + r, top_k.data() + r, top_p.data() + r, min_p.data() + r,
               seed.data() + r, index.data() + r, &alone, 1, n, dtype) == 0);
    CHECK(alone == id);
  }
}

template <class D>
void all(Call call, int dtype) {
  for (const int64_t n : {1, 2, 7, 15, 16, 17, 257, 1000})
    for (const Filters& f : {Filters{0, 0, 1, 0}, Filters{1, 0, 1, 0}, Filters{0.5f, 1, 1, 0},
                             Filters{2, 5, 0.5f, 0.1f}, Filters{1, 0, 0.001f, 0}, Filters{1, 0, 0, 0},
                             Filters{1, 1 << 30, 0.999f, 1}, Filters{1e-4f, -3, 0.9f, 0}})
      for (const int64_t rows : {0, 1, 4}) run<D>(call, dtype, rows, n, f);
  CHECK(call(nullptr, 0, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, 1, 0, dtype) == -2);
  CHECK(call(nullptr, 0, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, -1, 4, dtype) == -2);
}

int main() {
  int ran = 0;
  for (const auto& level : gm_sample_levels) {
    if (level.call == nullptr || !runs_here(level.name)) continue;
    all<Dtype<0>>(Call{level.call}, 0);
    all<Dtype<1>>(Call{level.call}, 1);
    all<Dtype<2>>(Call{level.call}, 2);
    CHECK(Call{level.call}(nullptr, 0, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, 0, 4,
                           99) == -1);
    ++ran;
  }
  CHECK(ran > 0);
  std::printf("sample: %d level(s)\n", ran);
}
