// gm_rotary_embedding under the sanitizers against float64: odd halves, heads wider than what is turned, one
// head and several, no k, both pairings, a position outside the table, every dtype and level.
#include "asan.h"
#include "asan_values.h"
#include "calls/rotary_embedding.h"

#include <vector>

GM_LEVELS(gm_rotary_embedding, (const GmRotaryEmbeddingCall&));
struct Call {  // by position
  decltype(gm_rotary_embedding_levels[0].call) entry;
  int operator()(void* q, int64_t q_token, int64_t q_head, int64_t hq, void* k, int64_t k_token,
                 int64_t k_head, int64_t hk, const int64_t* positions, const float* cos_sin, int64_t rows,
                 int64_t t, int64_t rot, int interleaved, int type) const {
    const GmRotaryEmbeddingCall call{.q = q,
                                     .q_stride = {q_token, q_head},
                                     .k = k,
                                     .k_stride = {k_token, k_head},
                                     .positions = positions,
                                     .cos_sin = cos_sin,
                                     .interleaved = interleaved,
                                     .t = t,
                                     .hq = hq,
                                     .positions_count = rows,
                                     .rot = rot,
                                     .hk = hk,
                                     .x_type = type};
    return entry(call);
  }
};

template <class D>
void run(Call call, int dtype, int64_t rot, int64_t heads, bool interleaved, int64_t pad, bool with_k) {
  using T = typename D::T;
  const int64_t tokens = 3, size = rot + pad, half = rot / 2, rows = 2;
  Numbers numbers;
  Buffer<T> q(tokens * heads, rot, size), k(with_k ? tokens : 0, rot, size);
  Buffer<float> table(rows, rot, rot);
  Buffer<int64_t> positions(tokens);
  positions.data()[0] = 1, positions.data()[1] = rows, positions.data()[2] = 0;
  for (int64_t p = 0; p < rows; ++p)
    for (int64_t i = 0; i < rot; ++i) table(p, i) = numbers.eighths();
  std::vector<double> before;
  for (int64_t r = 0; r < tokens * (heads + with_k); ++r)
    for (int64_t i = 0; i < rot; ++i) {
      const T value = D::put(numbers.eighths());
      (r < tokens * heads ? q(r, i) : k(r - tokens * heads, i)) = value;
      before.push_back(D::get(value));
    }
  CHECK(call(q.data(), heads * size, size, heads, with_k ? k.data() : nullptr, size, size, with_k,
             positions.data(), table.data(), rows, tokens, rot, interleaved, dtype) == 0);
  for (int64_t r = 0; r < tokens * (heads + with_k); ++r)
    for (int64_t i = 0; i < half; ++i) {
      const int64_t token = r < tokens * heads ? r / heads : r - tokens * heads, p = positions.data()[token];
      const int64_t ia = interleaved ? 2 * i : i, ib = interleaved ? 2 * i + 1 : half + i;
      T* row = r < tokens * heads ? &q(r, 0) : &k(r - tokens * heads, 0);
      const double a = before[r * rot + ia], b = before[r * rot + ib],
                   found[2] = {D::get(row[ia]), D::get(row[ib])};
      if (p >= rows) {
        CHECK(found[0] != found[0] && found[1] != found[1]);
        continue;
      }
      const double c = table(p, i), s = table(p, half + i), wanted[2] = {a * c - b * s, b * c + a * s};
      for (int j = 0; j < 2; ++j)
        CHECK(std::fabs(found[j] - wanted[j]) <= 1e-6 + D::kEps * std::fabs(wanted[j]));
    }
}

template <class D>
void all(Call call, int dtype) {
  for (int64_t rot : {2, 6, 14, 16, 30, 32, 34, 66})
    for (int64_t heads : {1, 3})
      for (bool interleaved : {false, true})
        for (int64_t pad : {0, 3})
          for (bool with_k : {false, true}) run<D>(call, dtype, rot, heads, interleaved, pad, with_k);
  CHECK(call(nullptr, 0, 0, 1, nullptr, 0, 0, 0, nullptr, nullptr, 1, 0, 2, 0, 99) == -1);
  CHECK(call(nullptr, 0, 0, 1, nullptr, 0, 0, 0, nullptr, nullptr, 1, 1, 3, 0, dtype) == -2);
  CHECK(call(nullptr, 0, 0, 1, nullptr, 0, 0, 1, nullptr, nullptr, 1, 1, 2, 0, dtype) == -2);
  CHECK(call(nullptr, 0, 0, 1, nullptr, 0, 0, 1, nullptr, nullptr, 1, 0, 2, 0, dtype) == 0);
}

int main() {
  int ran = 0;
  for (const auto& level : gm_rotary_embedding_levels) {
    if (level.call == nullptr || !runs_here(level.name)) continue;
    all<Dtype<0>>(Call{level.call}, 0), all<Dtype<1>>(Call{level.call}, 1),
        all<Dtype<2>>(Call{level.call}, 2);
    ++ran;
  }
  CHECK(ran > 0);
  std::printf("rotary_embedding: %d level(s)\n", ran);
}
