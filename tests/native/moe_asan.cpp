// The MoE cores under the sanitizers: experts without rows, one that takes all, ids of other ranks, tails, wrong offsets.
#include "asan.h"

struct Weights {  // moe::Weights of kernels/moe/_moe_cpu.h
  const void *codes, *scales, *zeros, *row_scale, *perm;
  int64_t n, k, columns, group;
  int32_t format, scale_type, zero_type, implicit_zero;
};

GM_LEVELS(gm_moe_permute, (const int32_t*, int32_t*, int32_t*, int32_t*, int64_t, int64_t));
GM_LEVELS(gm_moe_combine, (const void*, int64_t, int64_t, const int32_t*, const float*, void*, int64_t, int64_t, int64_t, int));
GM_LEVELS(gm_grouped_linear, (const Weights*, int64_t, const void*, int64_t, int64_t, const int32_t*, const int32_t*, int64_t, void*,
                              int64_t, int, int));
GM_LEVELS(gm_moe, (const Weights*, const Weights*, const void*, const float*, const int32_t*, int32_t*, int32_t*, int32_t*, void*,
                   void*, void*, int64_t, int64_t, int64_t, int));

constexpr int64_t kExperts = 5;

// float32 weights of ones, [experts, n, k], padded as cpu_rows16_v1 pads.
struct Ones {
  Buffer<float> codes;
  Weights w;
  Ones(int64_t n, int64_t k) : codes(kExperts * ((n + 15) / 16) * 16 * ((k + 31) / 32 * 32)), w{} {
    const int64_t columns = (k + 31) / 32 * 32, blocks = (n + 15) / 16;
    for (int64_t line = 0; line < kExperts * blocks * columns; ++line)
      for (int64_t r = 0; r < 16; ++r)
        codes(0, line * 16 + r) = line % columns < k && line / columns % blocks * 16 + r < n ? 1.0f : 0.0f;
    w.codes = codes.data();
    w.n = n;
    w.k = k;
    w.columns = w.group = columns;
    w.format = 4;
    w.scale_type = w.zero_type = -1;
  }
};

int32_t id_of(int64_t i, int kind) { return kind == 0 ? 3 : kind == 1 ? int32_t(i % 7) - 1 : -1; }

template <class Call>
void all(Call call, const char* level, int kind, int64_t tokens, int64_t top_k, int64_t hidden, int64_t inner) {
  const int64_t entries = tokens * top_k;
  Buffer<int32_t> ids(entries), offsets(kExperts + 1), permutation(entries), inverse(entries);
  Buffer<float> x(tokens * hidden), weights(entries), acts(entries * inner), rows(entries * hidden), out(tokens * hidden);
  for (int64_t i = 0; i < entries; ++i) {
    ids(0, i) = id_of(i, kind);
    weights(0, i) = 1.0f;
  }
  for (int64_t i = 0; i < tokens * hidden; ++i) x(0, i) = 1.0f;
  call(level, ids, offsets, permutation, inverse, x, weights, acts, rows, out);
}

int main() {
  int ran = 0;
  for (int l = 0; l < 6; ++l) {
    const char* name = gm_moe_levels[l].name;
    if (!runs_here(name)) continue;
    for (int kind = 0; kind < 3; ++kind)
      for (int64_t tokens : {0, 1, 9})
        for (int64_t hidden : {1, 33, 64}) {
          const int64_t top_k = 3, inner = 18, entries = tokens * top_k;
          const auto run = [&](const char*, auto& ids, auto& offsets, auto& permutation, auto& inverse, auto& x, auto& weights,
                               auto& acts, auto& rows, auto& out) {
            const auto permute = gm_moe_permute_levels[l].call;
            if (permute) {
              CHECK(permute(ids.data(), offsets.data(), permutation.data(), inverse.data(), entries, kExperts) == 0);
              CHECK(offsets(0, 0) == 0 && offsets(0, kExperts) <= entries);
            }
            const auto combine = gm_moe_combine_levels[l].call;
            for (int64_t i = 0; i < entries; ++i) inverse(0, i) = i % 4 ? int32_t(i) : -1;
            if (combine) {
              CHECK(combine(rows.data(), entries, hidden, inverse.data(), weights.data(), out.data(), tokens, top_k, hidden, 0) == 0);
              if (entries) {
                inverse(0, 0) = int32_t(entries);
                CHECK(combine(rows.data(), entries, hidden, inverse.data(), weights.data(), out.data(), tokens, top_k, hidden, 0) == -5);
              }
            }
            Ones w13(2 * inner, hidden), w2(hidden, inner);
            const auto fused = gm_moe_levels[l].call;
            if (!fused) return;
            CHECK(fused(&w13.w, &w2.w, x.data(), weights.data(), ids.data(), offsets.data(), permutation.data(), inverse.data(),
                        acts.data(), rows.data(), out.data(), tokens, top_k, kExperts, 0) == 0);
            for (int64_t t = 0; t < tokens; ++t)
              for (int64_t h = 0; h < hidden; ++h) CHECK((out(0, t * hidden + h) > 0) == (kind != 2));
            ++ran;
            const auto grouped = gm_grouped_linear_levels[l].call;
            if (!grouped || tokens == 0) return;
            CHECK(grouped(&w13.w, kExperts, x.data(), tokens, hidden, offsets.data(), permutation.data(), top_k, acts.data(), entries, 1,
                          0) == 0);
            CHECK(grouped(&w2.w, kExperts, acts.data(), entries, inner, offsets.data(), nullptr, 1, rows.data(), entries, 0, 0) == 0);
            offsets(0, kExperts) = int32_t(entries) + 1;
            CHECK(grouped(&w2.w, kExperts, acts.data(), entries, inner, offsets.data(), nullptr, 1, rows.data(), entries, 0, 0) == -5);
          };
          all(run, name, kind, tokens, top_k, hidden, inner);
        }
  }
  CHECK(ran > 0);
  std::printf("moe: %d run(s)\n", ran);
}
