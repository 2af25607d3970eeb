// Arguments of the attention entries, and their partition into tasks; see _flash_cpu.h.
#pragma once
#include "_flash_rows_cpu.h"

namespace gm {
namespace {

constexpr int64_t kChunk = 512;  // tokens; contexts are cut at multiples of it

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
  int64_t tokens, blocks, table_width;  // bounds of what the index tensors refer to
  int64_t seqs, heads, kv_heads, dk, dv, block_size, window;
  int64_t ahead;                   // keys after its own that a query sees
  float scale, softcap;            // softcap <= 0: none
  const float *k_scale, *v_scale;  // of codes; null: keys and values are of q's type
  int64_t k_scale_block, k_scale_slot, k_scale_head, v_scale_block, v_scale_slot, v_scale_head;
  int64_t token_scales;  // whether scales are per token and head; else per head, or one with strides of 0
};

// A task: one KV head of one sequence, `queries` new tokens and `heads` query heads of it. Row r is query `first + r /
// heads` and query head `head + r % heads`. With kv_heads > 1 (one query) also the following KV heads: rows of KV head n
// begin at n * rows().
struct Task {
  int64_t sequence, kv_head, kv_heads, token, first, queries, head, heads, context;
  int64_t rows() const { return queries * heads; }
  int64_t all_rows() const { return kv_heads * rows(); }
  // Keys that some query sees end here.
  int64_t reach(int64_t ahead) const { return min(context, first + queries + ahead); }
};

// Partition of the work into tasks, and of their contexts into chunks.
struct Tiling {
  const Attention& a;
  const int64_t group = a.heads / a.kv_heads;
  const int64_t max_rows = a.dk + a.dv <= 512 ? 96 : 48;  // queries and sums fit the L2 cache
  const int64_t head_tiles = (group + max_rows - 1) / max_rows;
  const int64_t head_tile = (group + head_tiles - 1) / head_tiles;
  const int64_t query_tile = max(1, max_rows / head_tile);
  int64_t kv_heads_per_task = 1;  // KV heads of a task of one query

  // Rows of the largest task.
  int64_t row_bound() const {
    return (max(kv_heads_per_task, query_tile) * head_tile + kLanes - 1) / kLanes * kLanes;
  }
  int64_t queries(int64_t sequence) const { return a.query_start[sequence + 1] - a.query_start[sequence]; }
  int64_t kv_heads(int64_t sequence) const { return queries(sequence) == 1 ? kv_heads_per_task : 1; }
  int64_t query_tiles(int64_t sequence) const { return (queries(sequence) + query_tile - 1) / query_tile; }
  int64_t tasks(int64_t sequence) const {
    return query_tiles(sequence) * (a.kv_heads / kv_heads(sequence)) * head_tiles;
  }
  int64_t chunks(int64_t sequence) const { return max(1, (a.context(sequence) + kChunk - 1) / kChunk); }

  // Task `number` of a sequence. Tasks of one KV head are consecutive, the last queries, with most keys, first.
  Task task(int64_t sequence, int64_t number) const {
    const int64_t tiles = query_tiles(sequence), offset = (tiles - 1 - number % tiles) * query_tile;
    number /= tiles;
    Task t;
    t.sequence = sequence;
    t.kv_heads = kv_heads(sequence);
    t.kv_head = number / head_tiles * t.kv_heads;
    t.context = a.context(sequence);
    t.token = a.query_start[sequence] + offset;
    t.first = t.context - queries(sequence) + offset;
    t.queries = min(query_tile, queries(sequence) - offset);
    const int64_t head = number % head_tiles * head_tile;
    t.heads = min(head_tile, group - head);
    t.head = t.kv_head * group + head;
    return t;
  }

  // Prefix sums [seqs + 1] of tasks, and of (task, chunk) pairs, over the sequences.
  void count(int64_t* tasks_before, int64_t* parts_before) const {
    tasks_before[0] = parts_before[0] = 0;
    for (int64_t i = 0; i < a.seqs; ++i) {
      tasks_before[i + 1] = tasks_before[i] + tasks(i);
      parts_before[i + 1] = parts_before[i] + tasks(i) * chunks(i);
    }
  }
};

// Index of the last start[i] <= n, with start[0..count] ascending and n < start[count].
inline int64_t find(const int64_t* start, int64_t count, int64_t n) {
  int64_t low = 0, high = count;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (start[middle] <= n ? low : high) = middle;
  }
  return low;
}

// Whether every token, block and context that the index tensors refer to exists.
inline bool indices_in_range(const Attention& a) {
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

}  // namespace
}  // namespace gm
