// gm_paged_attention, gm_mla_attention and gm_varlen_attention (dense) under the sanitizers, against float64: odd widths,
// contexts of 0 and over one chunk, queries before their context, windows on both sides, sinks, more query heads than a
// tile, whole and split contexts, e4m3 codes with scales of heads and of tokens, every level.
//
// The whole cache is poisoned but for the slots that some query sees, and block tables hold
// garbage where nothing may be read. Planted faults that this program was seen to catch:
// `reach` in run_chunk without the bound t.context (read of a poisoned slot), the tail of widen_row
// read as a whole vector (past q), `skip` in find_places as 0 (read of a slot behind the window),
// the last store in finish whole (write past out), `inside` not checking blocks (wild read),
// scales of tokens gathered from 0 and not from `skip` (read of a poisoned scale).
#include "asan.h"
#include "asan_values.h"
#include "calls/mla_attention.h"
#include "calls/paged_attention.h"
#include "calls/varlen_attention.h"

#include <vector>

GM_LEVELS(gm_paged_attention, (const GmPagedAttentionCall&));
GM_LEVELS(gm_mla_attention, (const GmMlaAttentionCall&));
GM_LEVELS(gm_varlen_attention, (const GmVarlenAttentionCall&));

// Sizes and strides of a problem, whichever of the three it is.
struct Sizes {
  int64_t tokens, heads, kv_heads, dk, dv, seqs, blocks, block_size, table_width, window, table_stride,
      q_token, q_head, out_token, out_head, k_block, k_slot, k_head, v_block, v_slot, v_head, token_scales,
      k_scale_block, k_scale_slot, k_scale_head, v_scale_block, v_scale_slot, v_scale_head, ahead;
};

// Latent if the values are the keys, dense without a block table, else paged.
struct Call {
  decltype(gm_paged_attention_levels[0].call) paged;
  decltype(gm_mla_attention_levels[0].call) latent;
  decltype(gm_varlen_attention_levels[0].call) dense;
  int operator()(const void* q, const void* k, const void* v, void* out, float* lse, const float* sinks,
                 const int32_t* table, const int32_t* query_start, const int32_t* starts, float* k_scale,
                 float* v_scale, const Sizes& s, float scale, float softcap, int type) const {
    if (k == v && k)
      return latent({.q = q,
                     .q_stride = {s.q_token, s.q_head},
                     .cache = k,
                     .cache_stride = {s.k_block, s.k_slot},
                     .block_table = table,
                     .block_table_stride = {s.table_stride},
                     .query_start = query_start,
                     .seq_lens = starts,
                     .scale = scale,
                     .latent_dim = s.dv,
                     .lse = lse,
                     .out = out,
                     .out_stride = {s.out_token, s.out_head},
                     .q_tokens = s.tokens,
                     .heads = s.heads,
                     .rope_dim = s.dk - s.dv,
                     .blocks = s.blocks,
                     .block_size = s.block_size,
                     .seqs = s.seqs,
                     .max_blocks = s.table_width,
                     .x_type = type});
    if (!table)
      return dense({.q = q,
                    .q_stride = {s.q_token, s.q_head},
                    .k = k,
                    .k_stride = {s.k_slot, s.k_head},
                    .v = v,
                    .v_stride = {s.v_slot, s.v_head},
                    .query_start = query_start,
                    .context_start = starts,
                    .scale = scale,
                    .lse = lse,
                    .window_left = s.window - 1,
                    .window_right = s.ahead,
                    .out = out,
                    .out_stride = {s.out_token, s.out_head},
                    .q_tokens = s.tokens,
                    .heads = s.heads,
                    .qk_dim = s.dk,
                    .total_ctx = s.blocks,
                    .kv_heads = s.kv_heads,
                    .v_dim = s.dv,
                    .seqs = s.seqs,
                    .x_type = type});
    return paged({.q = q,
                  .q_stride = {s.q_token, s.q_head},
                  .k_cache = k,
                  .k_cache_stride = {s.k_block, s.k_slot, s.k_head},
                  .v_cache = v,
                  .v_cache_stride = {s.v_block, s.v_slot, s.v_head},
                  .block_table = table,
                  .block_table_stride = {s.table_stride},
                  .query_start = query_start,
                  .seq_lens = starts,
                  .scale = scale,
                  .window = s.window,
                  .sinks = sinks,
                  .lse = lse,
                  .k_scale = k_scale,
                  .k_scale_stride = {s.k_scale_block, s.k_scale_slot, s.k_scale_head},
                  .v_scale = v_scale,
                  .v_scale_stride = {s.v_scale_block, s.v_scale_slot, s.v_scale_head},
                  .softcap = softcap,
                  .out = out,
                  .out_stride = {s.out_token, s.out_head},
                  .q_tokens = s.tokens,
                  .heads = s.heads,
                  .head_dim = s.dk,
                  .blocks = s.blocks,
                  .block_size = s.block_size,
                  .kv_heads = s.kv_heads,
                  .seqs = s.seqs,
                  .max_blocks = s.table_width,
                  .scale_blocks = s.token_scales ? 1 << 30 : 1,
                  .scale_slots = s.token_scales ? 2 : 1,
                  .scale_heads = 2,
                  .x_type = type,
                  .kv_type = k_scale ? 3 : type});
  }
};
extern "C" int gm_pretended_threads;

namespace {

enum Scales { kNone, kHead, kToken };
struct Sequence {
  int64_t queries, context;
};
struct Case {
  std::vector<Sequence> seqs;
  int64_t heads, kv_heads, dk, dv, block_size, window;
  bool paged, latent, sinks;
  int64_t ahead = 0;  // keys after its own that a query sees, -1 = all; dense alone
};

// A cache of `slots` places of kv_heads vectors, all poisoned and NaN until opened.
template <class D>
class Cache {
  using T = typename D::T;

 public:
  Cache(int64_t slots, int64_t heads, int64_t width)
      : slots_(slots),
        heads_(heads),
        width_(width),
        head_(width + 8),
        slot_(heads * head_ + 8),
        buffer_(slots * slot_ + 1) {
    for (int64_t i = 0; i < slots * slot_; ++i) data()[i] = D::put(NAN);
    __asan_poison_memory_region(data(), sizeof(T) * (slots * slot_));
  }
  ~Cache() { __asan_unpoison_memory_region(data(), sizeof(T) * (slots_ * slot_)); }
  T* data() { return buffer_.data(); }
  int64_t head() const { return head_; }
  int64_t slot() const { return slot_; }
  T* at(int64_t slot, int64_t head) { return data() + slot * slot_ + head * head_; }
  void open(int64_t slot, Numbers& numbers) {
    for (int64_t h = 0; h < heads_; ++h) {
      __asan_unpoison_memory_region(at(slot, h), sizeof(T) * width_);
      for (int64_t d = 0; d < width_; ++d) at(slot, h)[d] = D::put(numbers.eighths());
    }
  }

 private:
  int64_t slots_, heads_, width_, head_, slot_;
  Buffer<T> buffer_;
};

template <class D, class Code = D>  // of queries and results, of keys and values
void run(Call call, int dtype, const Case& c, Scales kind = kNone) {
  using T = typename D::T;
  Numbers numbers;
  const int64_t count = int64_t(c.seqs.size()), bs = c.paged ? c.block_size : 1;
  int64_t tokens = 0, blocks = 0, width = 0;
  for (const Sequence& s : c.seqs) {
    const int64_t need = (s.context + bs - 1) / bs;
    tokens += s.queries, blocks += need, width = need > width ? need : width;
  }
  Buffer<int32_t> query_start(count + 1), starts(c.paged ? count : count + 1);
  Buffer<int32_t> table(count, width, width + 2);
  std::vector<std::vector<int64_t>> slot_of(count);
  Cache<Code> k(blocks * bs, c.kv_heads, c.dk), v(c.latent ? 0 : blocks * bs, c.kv_heads, c.dv);
  const int64_t scale_slots = kind == kToken ? blocks * bs : kind == kHead;
  Cache<Dtype<0>> k_scale(scale_slots, c.kv_heads, 1), v_scale(scale_slots, c.kv_heads, 1);
  if (kind == kHead) k_scale.open(0, numbers), v_scale.open(0, numbers);
  // Blocks are dealt from the last to the first.
  for (int64_t i = 0, next = blocks - 1; i < count; ++i) {
    const Sequence& s = c.seqs[i];
    query_start.data()[i + 1] = query_start.data()[i] + int32_t(s.queries);
    if (c.paged)
      starts.data()[i] = int32_t(s.context);
    else
      starts.data()[i + 1] = starts.data()[i] + int32_t(s.context);
    const int64_t first = s.context - s.queries, low = c.window > 0 ? first - c.window + 1 : 0;
    if (c.paged)
      for (int64_t b = 0; b < width; ++b) table(i, b) = INT32_MIN;
    for (int64_t at = 0; at < s.context; ++at) {
      if (c.paged && at % bs == 0) {
        const bool seen = at + bs > low && s.queries > 0;
        table(i, at / bs) = seen ? int32_t(next) : -7;
        --next;
      }
      slot_of[i].push_back(c.paged ? (next + 1) * bs + at % bs : starts.data()[i] + at);
      if (at < low || s.queries == 0) continue;
      k.open(slot_of[i].back(), numbers);
      if (!c.latent) v.open(slot_of[i].back(), numbers);
      if (kind == kToken) k_scale.open(slot_of[i].back(), numbers), v_scale.open(slot_of[i].back(), numbers);
    }
  }
  Buffer<T> q(tokens * c.heads, c.dk, c.dk + 3), out(tokens * c.heads, c.dv, c.dv + 8);
  Buffer<float> lse(tokens * c.heads), sinks(c.heads);
  for (int64_t r = 0; r < tokens * c.heads; ++r)
    for (int64_t d = 0; d < c.dk; ++d) q(r, d) = D::put(numbers.eighths());
  for (int64_t h = 0; h < c.heads; ++h) sinks.data()[h] = numbers.eighths();
  Cache<Code>& values = c.latent ? k : v;
  const auto number = [&](Cache<Code>& cache, Cache<Dtype<0>>& scales, int64_t slot, int64_t head,
                          int64_t d) {
    const double factor = kind == kNone ? 1 : *scales.at(kind == kToken ? slot : 0, head);
    return factor * Code::get(cache.at(slot, head)[d]);
  };
  const int64_t scale_slot = kind == kToken ? k_scale.slot() : 0;
  const Sizes sizes = {tokens,
                       c.heads,
                       c.kv_heads,
                       c.dk,
                       c.dv,
                       count,
                       blocks,
                       bs,
                       c.paged ? width : 0,
                       c.window,
                       c.paged ? width + 2 : 0,
                       c.heads * (c.dk + 3),
                       c.dk + 3,
                       c.heads * (c.dv + 8),
                       c.dv + 8,
                       bs * k.slot(),
                       k.slot(),
                       k.head(),
                       bs * values.slot(),
                       values.slot(),
                       values.head(),
                       kind == kToken,
                       bs * scale_slot,
                       scale_slot,
                       k_scale.head(),
                       bs * scale_slot,
                       scale_slot,
                       v_scale.head(),
                       c.ahead};
  const float scale = 1 / std::sqrt(float(c.dk));
  const auto attend = [&](const Sizes& shape, float softcap = 0) {
    return call(q.data(), k.data(), values.data(), out.data(), lse.data(), c.sinks ? sinks.data() : nullptr,
                c.paged ? table.data() : nullptr, query_start.data(), starts.data(),
                kind ? k_scale.data() : nullptr, kind ? v_scale.data() : nullptr, shape, scale, softcap,
                dtype);
  };
  for (const int threads : {1, 4}) {  // with several threads long contexts are split
    gm_pretended_threads = threads;
    const float softcap = threads == 1 || !c.paged || c.latent ? 0 : 1.5f;
    CHECK(attend(sizes, softcap) == 0);
    for (int64_t i = 0, token = 0; i < count; ++i)
      for (int64_t n = 0; n < c.seqs[i].queries; ++n, ++token)
        for (int64_t h = 0; h < c.heads; ++h) {
          const int64_t own = c.seqs[i].context - c.seqs[i].queries + n, head = h / (c.heads / c.kv_heads),
                        r = token * c.heads + h;
          const int64_t low = c.window > 0 && own - c.window + 1 > 0 ? own - c.window + 1 : 0;
          const int64_t last = c.seqs[i].context - 1,
                        high = c.ahead < 0 || own + c.ahead > last ? last : own + c.ahead;
          std::vector<double> score, sum(c.dv, 0.0);
          double top = c.sinks ? sinks.data()[h] : -INFINITY;
          for (int64_t at = low; at <= high; ++at) {
            double dot = 0;
            for (int64_t d = 0; d < c.dk; ++d)
              dot += double(D::get(q(r, d))) * number(k, k_scale, slot_of[i][at], head, d);
            dot *= scale;
            score.push_back(softcap > 0 ? std::tanh(dot / softcap) * softcap : dot);
            top = std::fmax(top, score.back());
          }
          double total = c.sinks ? std::exp(sinks.data()[h] - top) : 0;
          for (int64_t at = low; at <= high; ++at) {
            const double weight = std::exp(score[at - low] - top);
            total += weight;
            for (int64_t d = 0; d < c.dv; ++d)
              sum[d] += weight * number(values, v_scale, slot_of[i][at], head, d);
          }
          for (int64_t d = 0; d < c.dv; ++d) {
            const double wanted = total > 0 ? sum[d] / total : 0;
            CHECK(std::fabs(D::get(out(r, d)) - wanted) <= 2e-5 + D::kEps * std::fabs(wanted));
          }
          if (total > 0)
            CHECK(std::fabs(lse.data()[r] - (top + std::log(total))) <= 1e-4);
          else
            CHECK(lse.data()[r] == -INFINITY);
        }
  }
  gm_pretended_threads = 1;
  if (tokens == 0 || c.seqs[0].queries == 0 || c.seqs[0].context == 0) return;
  // Index tensors that name what does not exist are refused before anything is read.
  Sizes broken = sizes;
  broken.tokens = tokens - 1;
  CHECK(attend(broken) == -5);
  broken = sizes;
  broken.blocks = c.paged ? 0 : starts.data()[count] - 1;
  CHECK(attend(broken) == -5);
  std::swap(query_start.data()[0], query_start.data()[1]);
  CHECK(attend(sizes) == -5);
  std::swap(query_start.data()[0], query_start.data()[1]);
  if (c.paged) {
    const int32_t kept = starts.data()[0];
    for (const int32_t wrong : {-1, int32_t(width * bs + 1)}) {
      starts.data()[0] = wrong;
      CHECK(attend(sizes) == -5);
    }
    starts.data()[0] = kept;
    for (const int32_t wrong : {-1, int32_t(blocks), INT32_MAX}) {
      int32_t& entry = table(0, (kept - 1) / bs);
      const int32_t right = entry;
      entry = wrong;
      CHECK(attend(sizes) == -5);
      entry = right;
    }
  }
}

template <class D>
void all(Call call, int dtype) {
  const std::vector<Sequence> mixed = {{1, 1}, {3, 7}, {0, 5}, {1, 33}, {2, 1}, {1, 0}, {5, 5}, {1, 70}};
  const std::vector<Sequence> decode = {{1, 600}, {1, 17}}, prefill = {{70, 70}, {7, 257}};
  for (const int64_t window : {0, 1, 5, 40})
    for (const bool sinks : {false, true}) {
      run<D>(call, dtype, {mixed, 6, 2, 7, 7, 4, window, true, false, sinks});
      run<D>(call, dtype, {decode, 4, 2, 33, 33, 16, window, true, false, sinks});
      run<D>(call, dtype,
             {decode, 14, 2, 32, 32, 16, window, true, false, sinks});  // seven rows, read in place
    }
  for (const int64_t window : {0, 1, 5, 40})
    for (const int64_t ahead : {-1, 0, 3, 64}) {
      run<D>(call, dtype, {mixed, 4, 2, 16, 16, 1, window, false, false, false, ahead});
      run<D>(call, dtype, {prefill, 2, 2, 24, 17, 1, window, false, false, false, ahead});
      run<D>(call, dtype, {decode, 14, 2, 32, 32, 1, window, false, false, false, ahead});
    }
  run<D>(call, dtype, {mixed, 4, 4, 16, 16, 1, 0, false, false, false});
  run<D>(call, dtype, {mixed, 6, 2, 7, 5, 1, 0, false, false, false});
  run<D>(call, dtype, {decode, 2, 2, 8, 64, 1, 0, false, false, false});
  run<D>(call, dtype, {decode, 14, 2, 32, 48, 1, 0, false, false, false});
  run<D>(call, dtype, {decode, 3, 1, 40, 31, 7, 0, true, true, false});
  run<D>(call, dtype, {decode, 6, 1, 48, 32, 7, 0, true, true, false});
  run<D>(call, dtype, {prefill, 2, 1, 65, 65, 16, 0, true, false, false});
  run<D>(call, dtype, {prefill, 2, 1, 24, 65, 1, 0, false, false, false});
  run<D>(call, dtype, {prefill, 2, 1, 1, 1, 3, 9, true, false, true});
  run<D>(call, dtype, {prefill, 40, 1, 18, 16, 1, 0, false, false, false});  // more heads than rows of a tile
  run<D>(call, dtype, {{{1, 9}}, 40, 1, 36, 32, 5, 0, true, true, false});
  run<D>(call, dtype, {{{0, 0}}, 1, 1, 4, 4, 1, 0, true, false, false});
  using Codes = Dtype<3>;
  for (const Scales kind : {kHead, kToken})
    for (const int64_t window : {0, 5}) {
      run<D, Codes>(call, dtype, {mixed, 6, 2, 7, 7, 4, window, true, false, true}, kind);
      run<D, Codes>(call, dtype, {decode, 4, 2, 33, 33, 16, window, true, false, false}, kind);
      run<D, Codes>(call, dtype, {decode, 14, 2, 32, 32, 16, window, true, false, false}, kind);
      run<D, Codes>(call, dtype, {prefill, 2, 1, 65, 65, 16, window, true, false, false}, kind);
    }
  Sizes sizes{.tokens = 1, .heads = 3, .kv_heads = 2, .dk = 4, .dv = 4, .seqs = 1};
  const int32_t table = 0;
  float one = 1;
  const auto bare = [&](float* scale) {
    return call(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, &table, nullptr, nullptr, scale,
                nullptr, sizes, 1.0f, 0.0f, dtype);
  };
  CHECK(bare(nullptr) == -2);
  sizes.heads = 2, sizes.block_size = 1;
  CHECK(bare(&one) == -5);  // scales of keys alone
  sizes.token_scales = 1;
  CHECK(bare(nullptr) == -5);  // scales of tokens that are not there
}

}  // namespace

int main() {
  int ran = 0;
  for (size_t i = 0; i < sizeof gm_paged_attention_levels / sizeof *gm_paged_attention_levels; ++i) {
    const auto& paged = gm_paged_attention_levels[i];
    const auto& latent = gm_mla_attention_levels[i];
    const auto& dense = gm_varlen_attention_levels[i];
    if (paged.call == nullptr) continue;
    const bool here[] = {runs_here(paged.name), runs_here(latent.name), runs_here(dense.name)};
    if (!here[0] || !here[1] || !here[2]) continue;
    const Call call{paged.call, latent.call, dense.call};
    all<Dtype<0>>(call, 0);
    all<Dtype<1>>(call, 1);
    all<Dtype<2>>(call, 2);
    CHECK(dense.call({.heads = 1, .qk_dim = 1, .kv_heads = 1, .v_dim = 1, .seqs = 1, .x_type = 99}) == -1);
    ++ran;
  }
  CHECK(ran > 0);
  std::printf("attention: %d level(s)\n", ran);
}
