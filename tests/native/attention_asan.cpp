// gm_attention under the sanitizers: odd widths and blocks, empty sequences, contexts over several chunks, windows, caches and index
// tensors of exactly the bytes they need, every dtype and level; paged, latent (v == k) and dense.
#include "asan.h"

using Call = int (*)(const void*, const void*, const void*, void*, float*, const float*, const int32_t*, const int32_t*, const int32_t*,
                     const int64_t*, float, int);
GM_LEVELS(gm_attention, (const void*, const void*, const void*, void*, float*, const float*, const int32_t*, const int32_t*,
                         const int32_t*, const int64_t*, float, int));

inline bool near_one(float v) { return v > 0.9999f && v < 1.0001f; }
inline bool near_one(uint16_t v) { return v == 0x3c00 || v == 0x3f80; }

enum Kind { kPaged, kLatent, kDense };

// All values are one, so every output is one: a weighted mean whatever the weights.
template <class T>
void run(Call call, int dtype, T one, Kind kind, int64_t dk, int64_t dv, int64_t size, int64_t window) {
  const int64_t counts[] = {1, 0, 5, 1, 37}, contexts[] = {1100, 4, 5, 1, 49};
  const int64_t seqs = 5, heads = 6, kv_heads = kind == kLatent ? 1 : 2;
  int64_t tokens = 0, keys = 0, blocks = 0, width = 0;
  Buffer<int32_t> query_start(seqs + 1), starts(kind == kDense ? seqs + 1 : seqs);
  for (int64_t i = 0; i < seqs; ++i) {
    query_start(0, i) = int32_t(tokens);
    starts(0, i) = int32_t(kind == kDense ? keys : contexts[i]);
    tokens += counts[i], keys += contexts[i], blocks += (contexts[i] + size - 1) / size;
    if ((contexts[i] + size - 1) / size > width) width = (contexts[i] + size - 1) / size;
  }
  query_start(0, seqs) = int32_t(tokens);
  if (kind == kDense) starts(0, seqs) = int32_t(keys);
  Buffer<int32_t> table(seqs * width);
  int32_t next = int32_t(blocks);
  for (int64_t i = 0; i < seqs; ++i)
    for (int64_t b = 0; b < width; ++b) table(0, i * width + b) = b * size < contexts[i] ? --next : 1 << 30;
  const int64_t rows = kind == kDense ? keys : blocks * size;
  Buffer<T> q(tokens * heads, dk, dk + 1), k(rows * kv_heads, dk, dk), v(rows * kv_heads, dv, dv), out(tokens * heads, dv, dv + 2);
  Buffer<float> lse(tokens * heads), sinks(heads);
  for (int64_t r = 0; r < rows * kv_heads; ++r) {
    for (int64_t d = 0; d < dk; ++d) k(r, d) = one;
    for (int64_t d = 0; d < dv; ++d) v(r, d) = one;
  }
  for (int64_t h = 0; h < heads; ++h) sinks(0, h) = -1e30f;
  const void* values = kind == kLatent ? k.data() : v.data();
  const int64_t slot = kv_heads * dk, v_slot = kind == kLatent ? slot : kv_heads * dv;
  int64_t sizes[21] = {tokens, heads, kv_heads, dk, dv, seqs, kind == kDense ? keys : blocks, size, width, window, width,
                       heads * (dk + 1), dk + 1, heads * (dv + 2), dv + 2, size * slot, slot, dk, size * v_slot, v_slot,
                       kind == kLatent ? dk : dv};
  const int32_t* blocks_of = kind == kDense ? nullptr : table.data();
  for (const float* sink : {static_cast<const float*>(nullptr), static_cast<const float*>(sinks.data())}) {
    CHECK(call(q.data(), k.data(), values, out.data(), lse.data(), sink, blocks_of, query_start.data(), starts.data(), sizes, 0.1f,
               dtype) == 0);
    for (int64_t r = 0; r < tokens * heads; ++r)
      for (int64_t d = 0; d < dv; ++d) CHECK(near_one(out(r, d)));
  }
  CHECK(call(q.data(), k.data(), values, out.data(), nullptr, nullptr, blocks_of, query_start.data(), starts.data(), sizes, 0.1f, 99) ==
        -1);
  sizes[6] -= 1;  // one block, or key, fewer than the index tensors name
  CHECK(call(q.data(), k.data(), values, out.data(), nullptr, nullptr, blocks_of, query_start.data(), starts.data(), sizes, 0.1f,
             dtype) == -5);
}

template <class T>
void run_all(Call call, int dtype, T one) {
  run<T>(call, dtype, one, kPaged, 5, 5, 3, 0);
  run<T>(call, dtype, one, kPaged, 33, 33, 16, 0);
  run<T>(call, dtype, one, kLatent, 40, 19, 7, 0);
  run<T>(call, dtype, one, kDense, 24, 17, 1, 0);
  run<T>(call, dtype, one, kDense, 3, 50, 1, 20);
}

int main() {
  int ran = 0;
  for (const auto& level : gm_attention_levels) {
    if (level.call == nullptr || !runs_here(level.name)) continue;
    run_all<float>(level.call, 0, 1.0f);
    run_all<uint16_t>(level.call, 1, 0x3c00);
    run_all<uint16_t>(level.call, 2, 0x3f80);
    ++ran;
  }
  CHECK(ran > 0);
  std::printf("attention: %d level(s)\n", ran);
}
