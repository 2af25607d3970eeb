// Attention on CPUs with an online softmax (Milakov and Gimelshein, 2018; Dao et al., FlashAttention, 2022),
// shared by the attention cores: paged or dense keys and values, grouped query heads, separate widths of keys
// and values.
//
// A task is (sequence, KV head, up to kRows rows: query heads of that KV head times queries); for a sequence
// of one query it is all KV heads, which lie side by side in memory and are read at twice the speed of one
// head alone. It reads keys in tiles of kTile tokens, widened to float32 once for all its rows. Contexts are
// cut into chunks of kChunk tokens, at positions that depend on nothing else; each chunk has its own softmax
// and chunks are merged in order. Hence chunks may run on several threads or on one and a row's result is
// bitwise the same: it depends on neither threads nor the rest of the batch.
//
// Keys and values may be e4m3 codes. A scale of a head multiplies its queries and its results; scales of
// tokens and heads multiply scores and weights.
#pragma once
#include <cstdlib>

#include "_flash_rows_cpu.h"

namespace gm {
namespace {

constexpr int64_t kChunk = 512, kRows = 32;
constexpr int64_t kFewRows = 8;             // with at most this many rows keys and values are read in place
constexpr int64_t kSplitFloats = 16 << 20;  // partial results of split contexts: 64 MiB at most

struct Attention {
  const void *q, *k, *v;
  void* out;
  float* lse;                  // [tokens, heads] or null
  const float* sinks;          // [heads] or null
  const int32_t* query_start;  // [seqs + 1]
  const int32_t* table;        // block numbers, [seqs, table_width]; null: dense keys
  const int32_t* starts;       // paged: contexts' lengths [seqs]; dense: where each begins [seqs + 1]
  int64_t context(int64_t i) const { return table ? starts[i] : starts[i + 1] - starts[i]; }
  int64_t table_stride, q_token, q_head, out_token, out_head;
  int64_t k_block, k_slot, k_head, v_block, v_slot, v_head;
  int64_t tokens, blocks, table_width;  // bounds that the index tensors are checked against
  int64_t seqs, heads, kv_heads, dk, dv, block_size, window;
  float scale;
  const float *k_scale, *v_scale;  // of codes; null: keys and values are of q's type
  int64_t k_scale_block, k_scale_slot, k_scale_head, v_scale_block, v_scale_slot, v_scale_head;
  int64_t token_scales;  // they are of tokens and heads; else of heads, or one with strides of 0
};

// One task's place in the problem, and its rows: row r is query `first + r / heads` and query head `head + r
// % heads`.
struct Tile {
  int64_t sequence, kv_head, kv_heads, token, first, queries, head, heads, context;
  int64_t rows() const { return queries * heads; }
};  // with kv_heads > 1 the same again for the KV heads that follow

// Running softmax of `rows` rows: m_i is the maximum score, l_i the sum of exp(score - m_i), acc the weighted
// sum of values.
struct State {
  float *m_i, *l_i, *acc;
};

template <class T, class Code>  // of queries and results, of keys and values
struct Core {
  const Attention& a;
  const int64_t dk = padded(a.dk), dv = padded(a.dv), group = a.heads / a.kv_heads;
  const int64_t head_tile = least(group, kRows), head_tiles = (group + head_tile - 1) / head_tile;
  const int64_t query_tile = most(1, kRows / head_tile);
  const bool shared = a.k == a.v;  // values are the first dv elements of the keys (MLA)
  int64_t together = 1;            // KV heads of a one-query task

  int64_t head_floats() const { return kRows * (2 + dv); }
  int64_t state_floats() const { return together * head_floats(); }
  int64_t query_floats() const { return together * kRows * dk; }
  int64_t scratch_floats() const { return kRows * (kTile + 1) + kTile * (dk + dv); }
  State state(float* p) const { return {p, p + kRows, p + 2 * kRows}; }

  int64_t queries(int64_t sequence) const { return a.query_start[sequence + 1] - a.query_start[sequence]; }
  int64_t span(int64_t sequence) const { return queries(sequence) == 1 ? together : 1; }
  int64_t tasks(int64_t sequence) const {
    return (queries(sequence) + query_tile - 1) / query_tile * (a.kv_heads / span(sequence)) * head_tiles;
  }
  int64_t chunks(int64_t sequence) const { return most(1, (a.context(sequence) + kChunk - 1) / kChunk); }

  Tile tile(int64_t sequence, int64_t task) const {
    Tile t;
    t.sequence = sequence;
    t.head = task % head_tiles * head_tile;
    task /= head_tiles;
    t.kv_heads = span(sequence);
    t.kv_head = task % (a.kv_heads / t.kv_heads) * t.kv_heads;
    const int64_t begin = a.query_start[sequence], count = queries(sequence);
    const int64_t offset = task / (a.kv_heads / t.kv_heads) * query_tile;
    t.context = a.context(sequence);
    t.token = begin + offset;
    t.first = t.context - count + offset;
    t.queries = least(query_tile, count - offset);
    t.heads = least(head_tile, group - t.head);
    t.head += t.kv_head * group;
    return t;
  }

  // The part of a task that belongs to its KV head number n.
  Tile head_of(Tile t, int64_t n) const {
    t.kv_head += n;
    t.head += n * group;
    return t;
  }

  // Where the keys at .. at + kTile - 1 and their values begin, in elements from the first KV head's: found
  // once for all KV heads.
  struct Places {
    int64_t k[kTile], v[kTile], k_scale[kTile], v_scale[kTile];
  };
  // Of keys low .. end - 1 only: the others' blocks may not exist.
  void find_places(const Tile& t, int64_t at, int64_t low, int64_t end, Places& places) const {
    int64_t i = most(0, low - at);
    int64_t block = a.table ? (at + i) / a.block_size : 0,
            slot = a.table ? (at + i) % a.block_size : a.starts[t.sequence] + at + i;
    for (; i < kTile && at + i < end; ++i, ++slot) {
      if (a.table && slot == a.block_size) slot = 0, ++block;
      const int64_t from = a.table ? a.table[t.sequence * a.table_stride + block] : 0;
      places.k[i] = from * a.k_block + slot * a.k_slot;
      places.v[i] = from * a.v_block + slot * a.v_slot;
      if (!a.token_scales) continue;
      places.k_scale[i] = from * a.k_scale_block + slot * a.k_scale_slot;
      places.v_scale[i] = from * a.v_scale_block + slot * a.v_scale_slot;
    }
  }

  template <class From>
  static void widen_row(const From* from, float* to, int64_t n, float scale) {
    int64_t d = 0;
    for (; d + kLanes <= n; d += kLanes) store(to + d, load(from + d) * scale);
    if (d < n) store(to + d, load(from + d, n - d) * scale);
  }
  static void prefetch(const Code* p, int64_t n) {
    for (int64_t d = 0; d < n; d += int64_t(64 / sizeof(Code))) __builtin_prefetch(p + d, 0, 2);
  }

  void clear(const Tile& t, float* states) const {
    for (int64_t n = 0; n < t.kv_heads; ++n) {
      const State s = state(states + n * head_floats());
      for (int64_t r = 0; r < t.rows(); ++r) s.m_i[r] = minus_infinity(), s.l_i[r] = 0;
      std::memset(s.acc, 0, sizeof(float) * size_t(t.rows() * dv));
    }
  }

  void load_queries(const Tile& whole, float* q) const {
    for (int64_t n = 0; n < whole.kv_heads; ++n) {
      const Tile t = head_of(whole, n);
      const bool scaled = a.k_scale && !a.token_scales;
      const float scale = scaled ? a.scale * a.k_scale[t.kv_head * a.k_scale_head] : a.scale;
      for (int64_t r = 0; r < t.rows(); ++r) {
        const int64_t token = t.token + r / t.heads, head = t.head + r % t.heads;
        widen_row(static_cast<const T*>(a.q) + token * a.q_token + head * a.q_head, q + (n * kRows + r) * dk,
                  a.dk, scale);
      }
    }
  }

  // Softmax of chunk `chunk` alone, into `states`.
  void run_chunk(const Tile& t, int64_t chunk, const float* q, float* states, float* scratch) const {
    clear(t, states);
    const int64_t last = t.first + t.queries - 1;
    const int64_t low = a.window > 0 ? most(0, t.first - a.window + 1) : 0;
    const int64_t reach = least(t.context, last + 1), end = least((chunk + 1) * kChunk, reach);
    Places here, next;
    int64_t at = most(chunk * kChunk, low / kTile * kTile);
    find_places(t, at, low, reach, here);
    for (; at < end; at += kTile) {
      find_places(t, at + kTile, low, reach, next);
      for (int64_t n = 0; n < t.kv_heads; ++n)
        run_tile(t, n, at, end, reach, low, here, next, q + n * kRows * dk, state(states + n * head_floats()),
                 scratch);
      here = next;
    }
  }

  // Keys at .. min(at + kTile, end) of KV head number n; those under `low` no row sees, and they are not
  // read. The task goes on to `reach`.
  void run_tile(const Tile& all, int64_t n, int64_t at, int64_t end, int64_t reach, int64_t low,
                const Places& here, const Places& next, const float* q, State s, float* scratch) const {
    const Tile t = head_of(all, n);
    const Code *first_k = static_cast<const Code*>(a.k) + all.kv_head * a.k_head, *k = first_k + n * a.k_head;
    const Code *first_v = static_cast<const Code*>(a.v) + all.kv_head * a.v_head, *v = first_v + n * a.v_head;
    float* buffer = scratch + kRows * (kTile + 1);
    const int64_t rows = t.rows(), tokens = least(kTile, end - at), whole = padded(tokens),
                  skip = most(0, low - at);
    float token_scales[2 * kTile];  // of the tile's keys, then of its values; 0 where there are none
    const float* scales = nullptr;
    if (a.token_scales) {
      std::memset(token_scales, 0, sizeof token_scales);
      for (int64_t i = skip; i < tokens; ++i) {
        token_scales[i] = a.k_scale[here.k_scale[i] + t.kv_head * a.k_scale_head];
        token_scales[kTile + i] = a.v_scale[here.v_scale[i] + t.kv_head * a.v_scale_head];
      }
      scales = token_scales;
    }
    if (rows <= kFewRows && dk == a.dk && dv == a.dv) {
      // Few rows: each key and value is used so seldom that a buffer costs more than it saves.
      InPlace<Code> keys, values;
      const Code* nothing = reinterpret_cast<const Code*>(buffer);
      std::memset(buffer, 0, sizeof(Code) * size_t(most(dk, dv)));
      for (int64_t i = 0; i < whole; ++i) {
        const bool in_tile = i >= skip && i < tokens;
        keys.rows[i] = in_tile ? k + here.k[i] : nothing;
        values.rows[i] = in_tile ? v + here.v[i] : nothing;
        // Each KV head fetches its share of the following tile, in the order of the addresses.
        const int64_t piece = n * kTile + i, token = piece / all.kv_heads, head = piece % all.kv_heads;
        const bool follows = at + kTile + token < reach;
        keys.next[i] = follows ? first_k + next.k[token] + head * a.k_head : nothing;
        values.next[i] = follows && !shared ? first_v + next.v[token] + head * a.v_head : nothing;
      }
      attend(t, at, tokens, whole, q, keys, values, scales, s, scratch);
      return;
    }
    float *keys = buffer, *values = keys + kTile * dk;
    std::memset(keys, 0, sizeof(float) * size_t(skip * dk));
    std::memset(keys + tokens * dk, 0, sizeof(float) * size_t((whole - tokens) * dk));
    std::memset(values, 0, sizeof(float) * size_t(skip * dv));
    for (int64_t i = skip; i < tokens; ++i) {
      if (!shared) prefetch(v + here.v[i], a.dv);
      widen_row(k + here.k[i], keys + i * dk, a.dk, 1.0f);
    }
    for (int64_t i = skip; i < tokens; ++i) {
      if (at + kTile + i < reach) prefetch(k + next.k[i], a.dk);
      if (!shared) widen_row(v + here.v[i], values + i * dv, a.dv, 1.0f);
    }
    if (shared)
      attend(t, at, tokens, whole, q, Widened{keys, dk}, Widened{keys, dk}, scales, s, scratch);
    else
      attend(t, at, tokens, whole, q, Widened{keys, dk}, Widened{values, dv}, scales, s, scratch);
  }

  // All rows of a tile: the arithmetic of a row is the same whatever rows it is computed with.
  template <class Rows>
  void attend(const Tile& t, int64_t at, int64_t tokens, int64_t whole, const float* q, const Rows& keys,
              const Rows& values, const float* scales, State s, float* scratch) const {
    float *p = scratch, *alpha = p + kRows * kTile;
    const int64_t rows = t.rows();
    int64_t r = 0;
    if (rows >= 4)
      attend_rows<4, true>(t, r, at, tokens, whole, q, keys, values, scales, s, p, alpha), r = 4;
    else if (rows >= 2)
      attend_rows<2, true>(t, r, at, tokens, whole, q, keys, values, scales, s, p, alpha), r = 2;
    else
      attend_rows<1, true>(t, r, at, tokens, whole, q, keys, values, scales, s, p, alpha), r = 1;
    for (; r + 4 <= rows; r += 4)
      attend_rows<4, false>(t, r, at, tokens, whole, q, keys, values, scales, s, p, alpha);
    for (; r + 2 <= rows; r += 2)
      attend_rows<2, false>(t, r, at, tokens, whole, q, keys, values, scales, s, p, alpha);
    if (r < rows) attend_rows<1, false>(t, r, at, tokens, whole, q, keys, values, scales, s, p, alpha);
  }
  template <int R, bool Ahead, class Rows>  // Ahead: fetch the following tile on the way
  void attend_rows(const Tile& t, int64_t r, int64_t at, int64_t tokens, int64_t whole, const float* q,
                   const Rows& keys, const Rows& values, const float* scales, State s, float* p,
                   float* alpha) const {
    constexpr int B = kLanes / R;
    for (int64_t i = 0; i < whole; i += B) {
      if constexpr (Ahead)
        for (int64_t b = 0; b < B; ++b) keys.fetch(i + b, 0, dk);
      const vf score = dot_rows<R>(q + r * dk, keys, i, dk);
      float lanes[kLanes];
      store(lanes, score);
      for (int n = 0; n < R; ++n) std::memcpy(p + (r + n) * kTile + i, lanes + n * B, sizeof(float) * B);
    }
    for (int n = 0; n < R; ++n)
      softmax_row(t, r + n, at, whole, scales, s, p + (r + n) * kTile, alpha + r + n);
    accumulate_rows<R, Ahead>(s.acc + r * dv, alpha + r, p + r * kTile, values, tokens, dv);
  }

  // Scores of one row for a tile of keys become weights; keys that the row does not see have weight
  // exactly 0, and a tile without visible keys changes nothing. Scales, of keys and of values, are not part
  // of the softmax's sum.
  void softmax_row(const Tile& t, int64_t r, int64_t at, int64_t whole, const float* scales, State s,
                   float* p, float* alpha) const {
    const int64_t position = t.first + r / t.heads;
    const int32_t high = int32_t(most(-1, least(position - at, kTile)));
    const int32_t low = a.window > 0 ? int32_t(most(0, least(position - a.window + 1 - at, kTile))) : 0;
    vf score[kTile / kLanes], best = splat(minus_infinity());
    vi lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = i;
    for (int64_t i = 0; i < whole; i += kLanes) {
      const vi place = lane + int32_t(i);
      const vi visible = (place <= high) & (place >= low);
      const vf product = scales ? load(p + i) * load(scales + i) : load(p + i);
      score[i / kLanes] = visible ? product : splat(minus_infinity());
      best = max(best, score[i / kLanes]);
    }
    const float m_i = s.m_i[r], m_tile = gm::max(best), m_new = m_i > m_tile ? m_i : m_tile;
    *alpha = 1;
    if (m_new == minus_infinity()) {
      std::memset(p, 0, sizeof(float) * kTile);
      return;
    }
    if (m_new != m_i) {
      *alpha = exp(m_i - m_new);
      s.m_i[r] = m_new;
    }
    vf l_tile = zero();
    for (int64_t i = 0; i < whole; i += kLanes) {
      const vf weight = exp(score[i / kLanes] - m_new);
      store(p + i, scales ? weight * load(scales + kTile + i) : weight);
      l_tile += weight;
    }
    s.l_i[r] = s.l_i[r] * *alpha + sum(l_tile);
  }

  // Combine two partial softmaxes into one.
  void merge(const Tile& t, float* whole, float* added) const {
    for (int64_t n = 0; n < t.kv_heads; ++n)
      merge(state(whole + n * head_floats()), state(added + n * head_floats()), t.rows());
  }
  void merge(State into, State part, int64_t rows) const {
    for (int64_t r = 0; r < rows; ++r) {
      if (part.m_i[r] == minus_infinity()) continue;
      float *x = into.acc + r * dv, *y = part.acc + r * dv;
      if (into.m_i[r] == minus_infinity()) {
        into.m_i[r] = part.m_i[r], into.l_i[r] = part.l_i[r];
        std::memcpy(x, y, sizeof(float) * size_t(dv));
        continue;
      }
      const float m_new = into.m_i[r] > part.m_i[r] ? into.m_i[r] : part.m_i[r];
      const float alpha = exp(into.m_i[r] - m_new), added = exp(part.m_i[r] - m_new);
      into.m_i[r] = m_new;
      into.l_i[r] = into.l_i[r] * alpha + part.l_i[r] * added;
      for (int64_t d = 0; d < dv; d += kLanes) store(x + d, load(x + d) * alpha + load(y + d) * added);
    }
  }

  void finish(const Tile& t, float* states) const {
    for (int64_t n = 0; n < t.kv_heads; ++n) finish_head(head_of(t, n), state(states + n * head_floats()));
  }
  void finish_head(const Tile& t, State s) const {
    for (int64_t r = 0; r < t.rows(); ++r) {
      const int64_t token = t.token + r / t.heads, head = t.head + r % t.heads;
      float m_i = s.m_i[r], l_i = s.l_i[r], scale = 1;
      if (a.sinks) {
        const float sink = a.sinks[head];
        const float m_new = m_i > sink ? m_i : sink;
        if (m_new != minus_infinity()) {
          scale = exp(m_i - m_new);
          l_i = l_i * scale + exp(sink - m_new);
          m_i = m_new;
        }
      }
      scale = l_i > 0 ? scale / l_i : 0;
      if (a.v_scale && !a.token_scales) scale *= a.v_scale[t.kv_head * a.v_scale_head];
      T* out = static_cast<T*>(a.out) + token * a.out_token + head * a.out_head;
      const float* acc = s.acc + r * dv;
      int64_t d = 0;
      for (; d + kLanes <= a.dv; d += kLanes) store(out + d, load(acc + d) * scale);
      if (d < a.dv) store(out + d, load(acc + d) * scale, a.dv - d);
      if (a.lse) a.lse[token * a.heads + head] = l_i > 0 ? m_i + __builtin_logf(l_i) : minus_infinity();
    }
  }

  // Index of the last start[i] <= n, with start[0..count] ascending and n < start[count].
  static int64_t find(const int64_t* start, int64_t count, int64_t n) {
    int64_t low = 0, high = count;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (start[middle] <= n ? low : high) = middle;
    }
    return low;
  }

  int run() {
    int64_t* start = static_cast<int64_t*>(std::malloc(sizeof(int64_t) * size_t(2 * (a.seqs + 1))));
    if (!start) return GM_E_NOMEM;
    int64_t* split = start + a.seqs + 1;  // the same in units of (task, chunk)
    const int64_t threads = gm_num_threads();
    together = a.kv_heads;
    count(start, split);
    if (split[a.seqs] < 2 * threads) together = 1, count(start, split);
    const int64_t whole = start[a.seqs], parts = split[a.seqs];
    // Few tasks and long contexts (decode of a small batch): let the chunks of a task run at once.
    const bool apart =
        threads > 1 && whole < 4 * threads && parts > whole && parts * state_floats() <= kSplitFloats;
    const int code = apart ? run_split(start, split) : run_whole(start);
    std::free(start);
    return code;
  }

  void count(int64_t* start, int64_t* split) const {
    start[0] = split[0] = 0;
    for (int64_t i = 0; i < a.seqs; ++i) {
      start[i + 1] = start[i] + tasks(i);
      split[i + 1] = split[i] + tasks(i) * chunks(i);
    }
  }

  static float* allocate(int64_t floats) {
    return static_cast<float*>(std::malloc(sizeof(float) * size_t(floats)));
  }

  // Each task runs its chunks one after another.
  int run_whole(const int64_t* start) const {
    bool failed = false;
    const int code = parallel_for(start[a.seqs], 1, [&](int64_t begin, int64_t end) {
      float* memory = allocate(2 * state_floats() + query_floats() + scratch_floats());
      if (!memory) {
        __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
        return;
      }
      float *all = memory, *part = all + state_floats(), *q = part + state_floats(),
            *scratch = q + query_floats();
      for (int64_t n = begin; n < end; ++n) {
        const int64_t sequence = find(start, a.seqs, n);
        const Tile t = tile(sequence, n - start[sequence]);
        load_queries(t, q);
        clear(t, all);
        for (int64_t chunk = 0; chunk < chunks(sequence); ++chunk) {
          run_chunk(t, chunk, q, part, scratch);
          merge(t, all, part);
        }
        finish(t, all);
      }
      std::free(memory);
    });
    return failed ? GM_E_NOMEM : code;
  }

  // Chunks run in any order and are merged in sequence.
  int run_split(const int64_t* start, const int64_t* split) const {
    const int64_t each = state_floats(), parts = split[a.seqs];
    float* states = allocate(parts * each);
    if (!states) return GM_E_NOMEM;
    bool failed = false;
    int code = parallel_for(parts, 1, [&](int64_t begin, int64_t end) {
      float* memory = allocate(query_floats() + scratch_floats());
      if (!memory) {
        __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
        return;
      }
      float *q = memory, *scratch = q + query_floats();
      for (int64_t n = begin; n < end; ++n) {
        const int64_t sequence = find(split, a.seqs, n), count = chunks(sequence),
                      place = n - split[sequence];
        const Tile t = tile(sequence, place / count);
        load_queries(t, q);
        run_chunk(t, place % count, q, states + n * each, scratch);
      }
      std::free(memory);
    });
    if (!failed && code == GM_OK)
      code = parallel_for(start[a.seqs], 1, [&](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; ++n) {
          const int64_t sequence = find(start, a.seqs, n), count = chunks(sequence),
                        task = n - start[sequence];
          const Tile t = tile(sequence, task);
          float* first = states + (split[sequence] + task * count) * each;
          for (int64_t chunk = 1; chunk < count; ++chunk) merge(t, first, first + chunk * each);
          finish(t, first);
        }
      });
    std::free(states);
    return failed ? GM_E_NOMEM : code;
  }
};

// Whether every token, block and context that the index tensors name exists.
inline bool inside(const Attention& a) {
  for (int64_t i = 0; i < a.seqs; ++i) {
    const int64_t begin = a.query_start[i], end = a.query_start[i + 1], context = a.context(i);
    if (begin < 0 || end < begin || end > a.tokens || context < 0) return false;
    if (!a.table) {
      if (a.starts[i] < 0 || a.starts[i] + context > a.blocks) return false;
      continue;
    }
    if (context > a.table_width * a.block_size) return false;
    for (int64_t b = 0; b * a.block_size < context; ++b) {
      const int64_t block = a.table[i * a.table_stride + b];
      // Blocks that precede the window may be freed.
      const bool read = a.window <= 0 || (b + 1) * a.block_size > context - (end - begin) - a.window + 1;
      if (read && end > begin && (block < 0 || block >= a.blocks)) return false;
    }
  }
  return true;
}

template <class T, class Code>
int attend(const Attention& a) {
  if (!inside(a)) return GM_E_ARG;
  return Core<T, Code>{a}.run();
}

}  // namespace
}  // namespace gm
