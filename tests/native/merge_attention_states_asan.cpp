// gm_merge_attention_states under the sanitizers: odd and tail-only rows, empty partials that must not be
// read, every level.
#include <cmath>

#include "asan.h"
#include "calls/merge_attention_states.h"

GM_LEVELS(gm_merge_attention_states, (const GmMergeAttentionStatesCall&));

// Row 0 merges 3 and 1 with equal weights into 2;
// row 1 has only b; row 2 nothing. The empty partials are NaN.
struct Call {  // by position
  decltype(gm_merge_attention_states_levels[0].call) entry;
  int operator()(const void* a, const float* a_lse, const void* b, const float* b_lse, void* out, float* lse,
                 int64_t t, int64_t d, int type) const {
    const GmMergeAttentionStatesCall call{.a = a,
                                          .a_lse = a_lse,
                                          .b = b,
                                          .b_lse = b_lse,
                                          .out = out,
                                          .lse = lse,
                                          .t = t,
                                          .h = 1,
                                          .d = d,
                                          .x_type = type};
    return entry(call);
  }
};
template <class T>
void run(Call call, int dtype, T one, T two, T three, T nan) {
  for (int64_t size : {1, 3, 7, 8, 15, 16, 17, 31, 33, 64, 257}) {
    Buffer<T> a(3, size, size), b(3, size, size), out(3, size, size);
    Buffer<float> a_lse(3), b_lse(3), lse(3);
    const float p[] = {0.5f, -INFINITY, -INFINITY}, q[] = {0.5f, -4.0f, -INFINITY};
    for (int64_t r = 0; r < 3; ++r) {
      a_lse.data()[r] = p[r];
      b_lse.data()[r] = q[r];
      for (int64_t c = 0; c < size; ++c) {
        a(r, c) = r == 0 ? three : nan;
        b(r, c) = r == 2 ? nan : one;
        out(r, c) = nan;
      }
    }
    CHECK(call(a.data(), a_lse.data(), b.data(), b_lse.data(), out.data(), lse.data(), 3, size, dtype) == 0);
    for (int64_t c = 0; c < size; ++c) {
      CHECK(out(0, c) == two);
      CHECK(out(1, c) == one);
      CHECK(out(2, c) == T{});
    }
    CHECK(std::fabs(lse.data()[0] - 1.1931472f) < 1e-6f && lse.data()[1] == -4.0f &&
          lse.data()[2] == -INFINITY);
  }
  CHECK(call(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, 0, 4, dtype) == 0);
  CHECK(call(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, 0, 4, 99) == -1);
  CHECK(call(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, 1, 0, dtype) == -2);
}

int main() {
  int ran = 0;
  for (const auto& level : gm_merge_attention_states_levels) {
    if (level.call == nullptr || !runs_here(level.name)) continue;
    run<float>(Call{level.call}, 0, 1.0f, 2.0f, 3.0f, NAN);
    run<uint16_t>(Call{level.call}, 1, 0x3c00, 0x4000, 0x4200, 0x7e00);
    run<uint16_t>(Call{level.call}, 2, 0x3f80, 0x4000, 0x4040, 0x7fc0);
    ++ran;
  }
  CHECK(ran > 0);
  std::printf("merge_attention_states: %d level(s)\n", ran);
}
