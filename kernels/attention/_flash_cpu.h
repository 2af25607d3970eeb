// FlashAttention on CPUs (Milakov and Gimelshein, 2018; Dao et al., 2022), for all attention entries: paged or dense keys
// and values, grouped query heads, different widths of keys and values.
//
// A task is (sequence, KV head, rows: query heads of that KV head times queries); for a sequence of one query it has all
// KV heads, which are adjacent in memory. It processes keys in tiles of kTile tokens. Tasks of few rows read keys and
// values in place, once, in the order of addresses, for memory bandwidth. Tasks of many rows widen each tile to float32
// once for all rows.
//
// Contexts are cut into chunks of kChunk tokens at fixed positions; each chunk has its own softmax, and chunks are merged
// in order. So a row's result is bitwise the same whether chunks run on one thread or several, and batch invariant.
//
// Keys and values may be e4m3 codes. A scale per head multiplies queries and results; scales per token and head multiply
// scores and weights.
#pragma once
#include <cstdlib>

#include "_flash_softmax_cpu.h"

namespace gm {
namespace {

constexpr int64_t kFewRows = 8;  // up to so many rows keys and values are read in place
// Tokens whose KV heads are read one after the other, while the next kRun tokens are prefetched.
constexpr int64_t kRun = max(8, kLanes);
constexpr int64_t kKeyFloats = 4096;        // widened keys per block of the loop over rows: the L1 cache
constexpr int64_t kSplitFloats = 16 << 20;  // at most, for partial results of split contexts: 64 MiB

template <class Code>
constexpr float kPieceScale = 1.0f;  // of elements relative to load_piece
template <>
constexpr float kPieceScale<f8e4m3> = 256.0f;

template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;

template <class T, class Code>  // of queries and results, of keys and values
struct FlashAttention {
  const Attention& a;
  Tiling tiling{a};
  const int64_t dk = padded(a.dk), dv = padded(a.dv);
  const bool shared = a.k == a.v;  // values are the first dv elements of the keys (MLA)
  int64_t rows = tiling.row_bound();

  int64_t state_floats() const { return SoftmaxState::floats(rows, dv); }
  int64_t scratch_floats() const {
    return rows * (kTile + 1) + tiling.kv_heads_per_task * 2 * kTile + kTile * (dk + dv);
  }

  // Offsets of keys at .. at + tokens - 1 and of their values, in elements, for KV head 0; those before `skip` are not
  // set.
  struct Offsets {
    int64_t tokens, skip;
    int64_t k[kTile], v[kTile], k_scale[kTile], v_scale[kTile];
  };
  // Only of keys low .. end - 1: the blocks of others may have been freed.
  void find_offsets(const Task& t, int64_t at, int64_t low, int64_t end, Offsets& offsets) const {
    offsets.tokens = max(0, min(kTile, end - at)), offsets.skip = max(0, low - at);
    for (int64_t i = offsets.skip, run; i < offsets.tokens; i += run) {
      // `run` consecutive tokens of one block.
      const int64_t slot = a.table ? (at + i) % a.block_size : a.starts[t.sequence] + at + i;
      const int64_t block = a.table ? a.table[t.sequence * a.table_stride + (at + i) / a.block_size] : 0;
      run = a.table ? min(a.block_size - slot, offsets.tokens - i) : offsets.tokens - i;
      const int64_t k = block * a.k_block + slot * a.k_slot, v = block * a.v_block + slot * a.v_slot;
      for (int64_t n = 0; n < run; ++n)
        offsets.k[i + n] = k + n * a.k_slot, offsets.v[i + n] = v + n * a.v_slot;
      if (!a.token_scales) continue;
      for (int64_t n = 0; n < run; ++n) {
        offsets.k_scale[i + n] = block * a.k_scale_block + (slot + n) * a.k_scale_slot;
        offsets.v_scale[i + n] = block * a.v_scale_block + (slot + n) * a.v_scale_slot;
      }
    }
  }

  // Prefetches the KV heads of a run of tokens, one per call, in the order of addresses.
  struct Prefetcher {
    const Code* base;
    const int64_t* offsets;
    int64_t tokens, heads, stride, width, head = 0;
    void next() {
      if (tokens <= 0) return;
      const Code* p = base + *offsets + head * stride;
      for (int64_t d = 0; d < width; d += int64_t(64 / sizeof(Code))) __builtin_prefetch(p + d);
      if (++head == heads) head = 0, ++offsets, --tokens;
    }
  };

  template <class From>
  static void widen_row(const From* from, float* to, int64_t n, float scale) {
    int64_t d = 0;
    for (; d + kPiece <= n; d += kPiece) store_piece(to + d, load_piece(from + d) * scale);
    if (d < n) store_piece(to + d, load_piece(from + d, n - d) * scale);
  }

  // Loads the queries of a task, scaled, in the order of elements of a piece of keys.
  void load_queries(const Task& t, float* q) const {
    for (int64_t n = 0; n < t.kv_heads; ++n) {
      const bool scaled = a.k_scale && !a.token_scales;
      const float scale =
          kPieceScale<Code> * (scaled ? a.scale * a.k_scale[(t.kv_head + n) * a.k_scale_head] : a.scale);
      for (int64_t r = 0; r < t.rows(); ++r, q += dk) {
        const T* from = static_cast<const T*>(a.q) + (t.token + r / t.heads) * a.q_token +
                        (t.head + n * tiling.group + r % t.heads) * a.q_head;
        if constexpr (kSame<T, Code>) {
          widen_row(from, q, a.dk, scale);
        } else {
          int64_t d = 0;
          for (; d + kLanes <= a.dk; d += kLanes) store(q + d, load(from + d) * scale);
          std::memset(q + d, 0, sizeof(float) * size_t(dk - d));
          if (d < a.dk) store(q + d, load(from + d, a.dk - d) * scale);
        }
      }
    }
  }

  // Attention over chunk `chunk` alone, into `s`.
  void run_chunk(const Task& t, int64_t chunk, const float* q, SoftmaxState s, float* scratch) const {
    s.clear((t.all_rows() + kLanes - 1) / kLanes * kLanes, dv);
    const int64_t low = a.window > 0 ? max(0, t.first - a.window + 1) : 0;
    // The end of the task, which may be in a later chunk: prefetches cross chunks.
    const int64_t reach = t.reach(a.ahead), end = min((chunk + 1) * kChunk, reach);
    Offsets memory[2], *here = memory, *next = memory + 1;
    int64_t at = max(chunk * kChunk, low / kTile * kTile);
    find_offsets(t, at, low, end, *here);
    for (; at < end; at += kTile) {
      find_offsets(t, at + kTile, low, reach, *next);
      run_tile(t, at, *here, *next, q, s, scratch);
      Offsets* last = here;
      here = next, next = last;
    }
  }

  // Keys at .. at + here.tokens; those before here.skip are visible to no row, and not read.
  void run_tile(const Task& t, int64_t at, Offsets& here, const Offsets& next, const float* q, SoftmaxState s,
                float* scratch) const {
    float *p = scratch, *alpha = p + rows * kTile, *scales = alpha + rows,
          *buffer = scales + tiling.kv_heads_per_task * 2 * kTile;
    if (a.token_scales) {
      std::memset(scales, 0, sizeof(float) * size_t(t.kv_heads * 2 * kTile));
      for (int64_t n = 0; n < t.kv_heads; ++n)
        for (int64_t i = here.skip; i < here.tokens; ++i) {
          scales[2 * n * kTile + i] = a.k_scale[here.k_scale[i] + (t.kv_head + n) * a.k_scale_head];
          scales[(2 * n + 1) * kTile + i] = a.v_scale[here.v_scale[i] + (t.kv_head + n) * a.v_scale_head];
        }
    } else {
      scales = nullptr;
    }
    if (t.rows() <= kFewRows && dk == a.dk && dv == a.dv)
      few_rows(t, at, here, next, q, scales, s, p, alpha);
    else
      many_rows(t, at, here, q, scales, s, p, alpha, buffer);
  }

  static int64_t whole(const Offsets& offsets) { return (offsets.tokens + kLanes - 1) / kLanes * kLanes; }

  void few_rows(const Task& t, int64_t at, Offsets& here, const Offsets& next, const float* q,
                const float* scales, SoftmaxState s, float* p, float* alpha) const {
    const int64_t count = t.rows(), skip = here.skip, tokens = here.tokens, first = skip / kRun * kRun;
    const Code* k = static_cast<const Code*>(a.k) + t.kv_head * a.k_head;
    const Code* v = static_cast<const Code*>(a.v) + t.kv_head * a.v_head;
    const auto fetch_keys = [&](const Offsets& offsets, int64_t i) {
      return Prefetcher{k, offsets.k + i, min(kRun, offsets.tokens - i), t.kv_heads, a.k_head, dk};
    };
    const auto fetch_values = [&](int64_t i) {
      return Prefetcher{v, here.v + i, shared ? 0 : min(kRun, tokens - i), t.kv_heads, a.v_head, dv};
    };
    // Replaces keys outside the range by neighbours, as whole runs are read; the softmax masks them.
    for (int64_t i = first; i < skip; ++i) here.k[i] = here.k[skip];
    for (int64_t i = tokens; i < (tokens + kRun - 1) / kRun * kRun; ++i) here.k[i] = here.k[tokens - 1];
    for (int64_t i = first; i < tokens; i += kRun) {
      Prefetcher ahead = i + kRun < tokens ? fetch_keys(here, i + kRun) : fetch_values(skip);
      for (int64_t n = 0; n < t.kv_heads; ++n) {
        const InPlace<Code> keys{k + n * a.k_head, here.k};
        for_row_groups<4>(count, [&](auto group, int64_t r) {
          constexpr int R = group.value;
          for (int64_t b = i; b < i + kRun; b += keys_of<R>) {
            if (r == 0)
              for (int n = 0; n < keys_of<R>; ++n) ahead.next();
            dot_rows<R>(q + (n * count + r) * dk, keys, b, dk, p + (n * count + r) * kTile);
          }
        });
      }
    }
    softmax(a, t, at, whole(here), scales, s, p, alpha);
    for (int64_t i = skip; i < tokens; i += kRun) {
      Prefetcher ahead = i + kRun < tokens ? fetch_values(i + kRun) : fetch_keys(next, next.skip);
      for (int64_t n = 0; n < t.kv_heads; ++n) {
        const InPlace<Code> values{v + n * a.v_head, here.v};
        for (int x = 0; x < kRun; ++x) ahead.next();
        for_row_groups<4>(count, [&](auto group, int64_t r) {
          constexpr int R = group.value;
          const int64_t row = n * count + r;
          accumulate_row<R>(s.acc + row * dv, i == skip ? alpha + row : nullptr, p + row * kTile, values, i,
                            min(i + kRun, tokens), dv);
        });
      }
    }
  }

  void many_rows(const Task& t, int64_t at, const Offsets& here, const float* q, const float* scales,
                 SoftmaxState s, float* p, float* alpha, float* buffer) const {
    const int64_t count = t.rows(), skip = here.skip, tokens = here.tokens, whole = this->whole(here);
    float *keys = buffer, *values = shared ? keys : keys + kTile * dk;
    const int64_t width = shared ? dk : dv;
    const auto widen = [&](const void* from, const int64_t* place, float* to, int64_t n, int64_t stride) {
      const int64_t first = skip / kLanes * kLanes;
      std::memset(to + first * stride, 0, sizeof(float) * size_t((skip - first) * stride));
      for (int64_t i = skip; i < tokens; ++i)
        widen_row(static_cast<const Code*>(from) + place[i], to + i * stride, n, 1.0f);
      std::memset(to + tokens * stride, 0, sizeof(float) * size_t((whole - tokens) * stride));
    };
    // Range of keys that are visible to some row of a group.
    const auto from = [&](int64_t r) { return int64_t(visible(a, t, r / t.heads, at).low); };
    const auto to = [&](int64_t r) { return min(tokens, visible(a, t, r / t.heads, at).high + 1); };
    const int64_t run = max(kLanes, kKeyFloats / dk / kLanes * kLanes);
    if (!shared)  // values are far from each other, and come while scores are computed
      for (Prefetcher ahead{static_cast<const Code*>(a.v) + t.kv_head * a.v_head, here.v + skip,
                            tokens - skip, 1, 0, dv};
           ahead.tokens > 0;)
        ahead.next();
    for (int64_t n = 0; n < t.kv_heads; ++n) {
      widen(static_cast<const Code*>(a.k) + (t.kv_head + n) * a.k_head, here.k, keys, a.dk, dk);
      for (int64_t i = skip / kLanes * kLanes; i < tokens; i += run)
        for_row_groups<kLanes == 8 ? 6 : 4>(count, [&](auto group, int64_t r) {
          constexpr int R = group.value, B = keys_of<R>;
          const int64_t last = min(min(i + run, whole), to(r + R - 1));
          for (int64_t b = max(i, from(r) / B * B); b < last; b += B)
            dot_rows<R>(q + (n * count + r) * dk, Widened{keys, dk}, b, dk, p + (n * count + r) * kTile);
        });
      if (n + 1 == t.kv_heads) softmax(a, t, at, whole, scales, s, p, alpha);
    }
    for (int64_t n = 0; n < t.kv_heads; ++n) {
      if (!shared || t.kv_heads > 1)
        widen(static_cast<const Code*>(a.v) + (t.kv_head + n) * a.v_head, here.v, values, a.dv, width);
      for (int64_t d = 0; d < dv; d += kPiece)
        for_row_groups<kLanes == 8 ? 6 : 4>(count, [&](auto group, int64_t r) {
          constexpr int R = group.value;
          const int64_t row = n * count + r, first = max(skip, from(r)), end = to(r + R - 1);
          if (first < end)  // else nothing changes: alpha is 1
            accumulate<R, 1>(s.acc + row * dv, alpha + row, p + row * kTile, Widened{values, width}, first,
                             end, dv, d);
        });
    }
  }

  void finish(const Task& t, SoftmaxState s) const {
    for (int64_t row = 0; row < t.all_rows(); ++row) {
      const int64_t n = row / t.rows(), r = row % t.rows();
      const int64_t token = t.token + r / t.heads, head = t.head + n * tiling.group + r % t.heads;
      float m_i = s.m_i[row], l_i = s.l_i[row], scale = 1;
      if (a.sinks) {
        const float sink = a.sinks[head];
        const float m_new = m_i > sink ? m_i : sink;
        if (m_new != minus_infinity()) {
          scale = exp(m_i - m_new);
          l_i = l_i * scale + exp(sink - m_new);
          m_i = m_new;
        }
      }
      scale = kPieceScale<Code> * (l_i != 0 ? scale / l_i : 0);
      if (a.v_scale && !a.token_scales) scale *= a.v_scale[(t.kv_head + n) * a.v_scale_head];
      T* out = static_cast<T*>(a.out) + token * a.out_token + head * a.out_head;
      const float* acc = s.acc + row * dv;
      if constexpr (kSame<T, Code>) {
        int64_t d = 0;
        for (; d + kPiece <= a.dv; d += kPiece) store_piece(out + d, load_piece(acc + d) * scale);
        if (d < a.dv) store_piece(out + d, load_piece(acc + d) * scale, a.dv - d);
      } else {
        int64_t d = 0;
        for (; d + kLanes <= a.dv; d += kLanes) store(out + d, load(acc + d) * scale);
        if (d < a.dv) store(out + d, load(acc + d) * scale, a.dv - d);
      }
      if (a.lse) a.lse[token * a.heads + head] = l_i != 0 ? m_i + __builtin_logf(l_i) : minus_infinity();
    }
  }

  int run() {
    int64_t* tasks = static_cast<int64_t*>(std::malloc(sizeof(int64_t) * size_t(2 * (a.seqs + 1))));
    if (!tasks) return GM_E_NOMEM;
    int64_t* parts = tasks + a.seqs + 1;
    const int64_t threads = gm_num_threads();
    tiling.kv_heads_per_task = a.kv_heads;
    tiling.count(tasks, parts);
    if (parts[a.seqs] < 2 * threads) tiling.kv_heads_per_task = 1, tiling.count(tasks, parts);
    rows = tiling.row_bound();
    const int64_t whole = tasks[a.seqs], pieces = parts[a.seqs];
    // Few tasks and long contexts (decode of a small batch): split-KV, chunks of a task run in parallel.
    const bool split =
        threads > 1 && whole < 4 * threads && pieces > whole && pieces * state_floats() <= kSplitFloats;
    const int code = split ? run_split(tasks, parts) : run_whole(tasks);
    std::free(tasks);
    return code;
  }

  static float* allocate(int64_t floats) {
    return static_cast<float*>(std::aligned_alloc(64, (sizeof(float) * size_t(floats) + 63) / 64 * 64));
  }

  // Dynamic scheduling: body(n, memory) for n < count, with `floats` of memory per thread.
  template <class Body>
  static int for_each(int64_t count, int64_t floats, const Body& body) {
    int64_t next = 0;
    bool failed = false;
    const int code = parallel_for(min(count, gm_num_threads()), 1, [&](int64_t, int64_t) {
      float* memory = allocate(floats);
      if (!memory) {
        __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
        return;
      }
      for (int64_t n; (n = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < count;) body(n, memory);
      std::free(memory);
    });
    return failed ? GM_E_NOMEM : code;
  }

  // One thread per task, chunk after chunk.
  int run_whole(const int64_t* tasks) const {
    const int64_t each = state_floats();
    return for_each(tasks[a.seqs], 2 * each + rows * dk + scratch_floats(), [&](int64_t n, float* memory) {
      const SoftmaxState all(memory, rows), part(memory + each, rows);
      float *q = memory + 2 * each, *scratch = q + rows * dk;
      const int64_t sequence = find(tasks, a.seqs, n);
      const Task t = tiling.task(sequence, n - tasks[sequence]);
      load_queries(t, q);
      run_chunk(t, 0, q, all, scratch);
      for (int64_t chunk = 1; chunk * kChunk < t.reach(a.ahead); ++chunk) {
        run_chunk(t, chunk, q, part, scratch);
        merge(all, part, t.all_rows(), dv);
      }
      finish(t, all);
    });
  }

  // Split-KV: chunks run in any order, and are merged in sequence.
  int run_split(const int64_t* tasks, const int64_t* parts) const {
    const int64_t each = state_floats();
    float* states = allocate(parts[a.seqs] * each);
    if (!states) return GM_E_NOMEM;
    int code = for_each(parts[a.seqs], rows * dk + scratch_floats(), [&](int64_t n, float* q) {
      const int64_t sequence = find(parts, a.seqs, n), count = tiling.chunks(sequence),
                    place = n - parts[sequence];
      const Task t = tiling.task(sequence, place / count);
      load_queries(t, q);
      run_chunk(t, place % count, q, SoftmaxState(states + n * each, rows), q + rows * dk);
    });
    if (code == GM_OK)
      code = parallel_for(tasks[a.seqs], 1, [&](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; ++n) {
          const int64_t sequence = find(tasks, a.seqs, n), count = tiling.chunks(sequence),
                        number = n - tasks[sequence];
          const Task t = tiling.task(sequence, number);
          float* first = states + (parts[sequence] + number * count) * each;
          for (int64_t chunk = 1; chunk < count; ++chunk)
            merge(SoftmaxState(first, rows), SoftmaxState(first + chunk * each, rows), t.all_rows(), dv);
          finish(t, SoftmaxState(first, rows));
        }
      });
    std::free(states);
    return code;
  }
};

template <class T, class Code>
int attend(const Attention& a) {
  if (!indices_in_range(a)) return GM_E_ARG;
  return FlashAttention<T, Code>{a}.run();
}

}  // namespace
}  // namespace gm
