// Tile scheduler of attention on Hopper: which rows and which tiles of keys a CTA processes next, found on
// the device.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "_attention_types_sm90.cuh"
#include "sm90/tma_store_3d.cuh"

namespace gm {

constexpr int kSorted = 512;  // largest number of sequences that are sorted, longest first
constexpr int kFew = 32;      // of which the scheduler warp sorts so many alone, one per lane
// Counters, all zero between launches: next work tile of prefill, next work tile of decode, finished CTAs; from
// kArrivals on, per unit of the workspace, how many parts of a context are complete.
constexpr int kArrivals = 32;
constexpr int kMaxParts = 16;  // of the context of a sequence with few rows (split-KV)

// How keys and values are copied to shared memory, where codes are converted to fp16.
enum Copies : int { kRowCopies, kBoxCopies, kCodeCopies };

struct AttentionParams {
  void* out;
  float* lse;          // [tokens, heads] or null
  const float* sinks;  // [heads] or null
  const int* table;
  const int* query_start;
  const int* seq_lens;
  unsigned* counters;
  float* units;       // sums of 16 rows over a part of their context; then 4 for each CTA
  int unit_count;     // without those of the CTAs
  const void *k, *v;  // for pages that are not copied as boxes
  int64_t k_block, k_slot, k_head, v_block, v_slot, v_head;  // strides, in elements
  int64_t table_row, out_token, out_head;
  int seqs, heads, kv_heads, head_dim, group, tile_q, window;  // tile_q: queries of a tile
  int blocks, page, box, log_boxes;
  int part_tiles;   // approximate length of a part of a context, in tiles of keys
  int shared_rows;  // with at most so many rows (64 or 0) the warpgroups share the keys of a work tile
  int reading;      // cost of a tile of keys of a decode relative to one of a prefill, in eighths
  int columns;      // of the page table
  uint32_t by_page, by_group, by_tile_q, by_kv_heads;
  float scale, scale_log2;
  // For caches of e4m3 codes, whose scores are log2-scaled already (scale_log2 is 1):
  const float *k_scale, *v_scale;
  // Strides of the scales in elements, 0 along dimensions that share a scale.
  int64_t k_scale_block, k_scale_slot, k_scale_head, v_scale_block, v_scale_slot, v_scale_head;
  float score_scale;
  int by_token, bf16;  // a scale per token and head; q and out are bf16, else fp16
  // Boxes of 64 elements of the results of 16 rows, of box_heads heads, for TMA; box_heads is 0 where rows make none.
  int box_heads;
  CUtensorMap out_map;
};

// n / d for 0 <= n < 2^31 by reciprocal(d).
constexpr uint32_t reciprocal(int d) { return 0xffffffffu / static_cast<uint32_t>(d); }

// Heads of up to D elements, GROUPS consumer warpgroups. Two have a staging buffer for results, and for what the
// second one merges into the first; three write their results straight from registers, and merge nothing.
template <int D, int GROUPS = 2>
struct AttentionShape {
  static constexpr int kGroups = GROUPS, kRows = GROUPS * 64, kKeys = 128, kStages = 2;
  static constexpr int kThreads = GROUPS * 128 + 128;
  static constexpr int kQ = kRows * D * 2, kTile = kKeys * D * 2, kStaging = GROUPS == 2 ? kRows * D * 2 : 0;
  static constexpr int kK = kQ, kV = kK + kStages * kTile, kOut = kV + kStages * kTile;
  // Of the second of two warpgroups: maximum and sum of weights of 64 rows.
  static constexpr int kSums = kOut + kStaging, kSumBytes = GROUPS == 2 ? 64 * 8 : 0;
  static constexpr int kOrder = kSums + kSumBytes;      // sequences in the order of work
  static constexpr int kCosts = kOrder + kSorted * 16;  // sort keys: number of tiles, long sequences first
  static constexpr int kUnits = kCosts + kSorted * 4;   // first unit of the sequences in the order of work
  // The consumers' work tile, two of the producers, and the consumers' next one: each is read again when its results
  // are written.
  static constexpr int kWork = kUnits + kSorted * 4, kNextWork = 3 * 48;
  static constexpr int kTotals = kWork + 4 * 48;
  static constexpr int kRowScales = kTotals + 32;  // codes: factor of a row that log2-scales its scores
  static constexpr int kKeyScales = kRowScales + kRows * 4;  // codes with a scale per key: four tiles
  static constexpr int kBars = kKeyScales + 4 * kKeys * 12;
  static constexpr int kUnit = (D / 8 + 1) * 128;  // floats of a unit of the workspace
  static constexpr int kBytes = kBars + (6 + 4 * kStages) * 8;
  // Codes are staged in the second half of their row as fp16, or in its last 64 bytes, and converted in place.
  static constexpr int kCodes = D == 64 ? 64 : kKeys * 128;
  static constexpr int kCopying = D / 32;  // producer warps: one per 64 elements of keys and of values
  // As _flash_sm90.cuh names them.
  static constexpr int kQueryDim = D, kValueDim = D, kKeyTile = kTile, kValueTile = kTile, kWorkBars = 4;
  static constexpr bool kKeepsQ = false;
  static constexpr int kProducerRegisters = GROUPS == 2 ? 56 : 32,
                       kConsumerRegisters = GROUPS == 2 ? 224 : 160;
};

// Heads of 136 to 256 elements, padded to 256 in shared memory.
template <>
struct AttentionShape<256, 2> {
  static constexpr int kGroups = 2, kRows = 128, kKeys = 64, kStages = 2, kThreads = 384, D = 256;
  static constexpr int kQ = kRows * D * 2, kTile = kKeys * D * 2;
  static constexpr int kOut = 0, kStaging = kQ;  // of results and merged accumulators: in the place of Q
  static constexpr int kK = kQ, kV = kK + kStages * kTile;
  static constexpr int kSums = kV + kStages * kTile;
  static constexpr int kOrder = kSums + 64 * 8;
  static constexpr int kCosts = kOrder + kSorted * 16;
  static constexpr int kUnits = kCosts + kSorted * 4;
  static constexpr int kWork = kUnits + kSorted * 4, kNextWork = 0;
  static constexpr int kTotals = kWork + 3 * 48;
  static constexpr int kBars = kTotals + 32;
  static constexpr int kUnit = (D / 8 + 1) * 128;
  static constexpr int kBytes = kBars + (6 + 4 * kStages) * 8;
  static constexpr int kCopying = 4;  // producer warps: two for keys, two for values
  static constexpr int kQueryDim = D, kValueDim = D, kKeyTile = kTile, kValueTile = kTile, kWorkBars = 4;
  static constexpr bool kKeepsQ = true;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
};

}  // namespace gm

#ifdef __CUDACC__
namespace gm {

__device__ __forceinline__ int quotient(int n, int d, uint32_t reciprocal) {
  const int q = __umulhi(n, reciprocal);  // exact or one too small
  return q + (n - q * d >= d);
}

// A work tile: the query heads of one KV head for up to tile_q queries of a sequence.
struct Work {
  int seq, head;     // head: of the KV heads
  int token, rows;   // the first query in q; query-head pairs, 0: no more work
  int position;      // of the first query
  int first, count;  // tiles of keys: `count` of them, down to `first`
  int end;           // number of keys
  // Index and number of parts of the context, packed into one word to save a register of the consumer warps.
  // There are several parts only for sequences with at most 64 rows.
  uint32_t part_of_parts;
  int unit;  // first unit of the parts, < 0 if this CTA processes all of them
  __device__ __forceinline__ int part() const { return part_of_parts & 255; }
  __device__ __forceinline__ int parts() const { return part_of_parts >> 8; }
  __device__ __forceinline__ bool last_part() const { return part() + 1 == parts(); }
};

// Splits the tiles first .. stop of a context into parts of about p.part_tiles tiles, longer ones where there
// would be more than kMaxParts. The split depends on this context alone, so that a row's result does not depend
// on the batch.
struct Parts {
  int tiles, before, count;  // before: parts that lie before `first`
};
__device__ __forceinline__ Parts parts_of(const AttentionParams& p, int first, int stop) {
  Parts parts;
  const int most = min(kMaxParts, max(1, stop / p.part_tiles));
  parts.tiles = max(1, cdiv(stop, most));
  parts.before = first / parts.tiles;
  parts.count = max(1, cdiv(stop, parts.tiles) - parts.before);
  return parts;
}

// Tiles of keys that are visible to queries position .. position + queries: first and end.
template <class S>
__device__ __forceinline__ int2 visible_tiles(const AttentionParams& p, int position, int queries) {
  constexpr int kKeys = S::kKeys;
  const int first = p.window > 0 ? max(0, position - p.window + 1) / kKeys : 0;
  return make_int2(first, max(first, cdiv(max(0, position + queries), kKeys)));
}

// Restricts a work tile to one of its parts.
template <class S>
__device__ __forceinline__ void select_part(const AttentionParams& p, Work& work, int part) {
  const int2 tiles = visible_tiles<S>(p, work.position, work.end - work.position);
  const Parts parts = parts_of(p, tiles.x, tiles.y);
  work.part_of_parts = part | work.parts() << 8;
  work.first = max(tiles.x, (parts.before + part) * parts.tiles);
  work.count = min(tiles.y, (parts.before + part + 1) * parts.tiles) - work.first;
}

struct Sequence {
  int token, queries, context, index;
};

__device__ __forceinline__ Sequence sequence_at(const AttentionParams& p, int i) {
  const int token = p.query_start[i], context = p.seq_lens[i];
  return {token, max(0, p.query_start[i + 1] - token), context, i};
}

// The only sequence of a batch, if it is long (of more than 64 rows); else one without queries.
__device__ __forceinline__ Sequence only_sequence(const AttentionParams& p) {
  Sequence seq{0, 0, 0, 0};
  if (p.seqs == 1) seq = sequence_at(p, 0);
  if (seq.queries * p.group <= 64) seq.queries = 0;
  return seq;
}

// Results of sort_sequences in shared memory; kLast: whether this CTA completes the last part of a context.
enum : int { kLong, kLongTiles, kLongWork, kShortTiles, kShortWork, kLast };

// What a sequence is to the scheduler: its sort key, by which long sequences (of more than 64 rows) come before short
// ones, and of both kinds the longest context first; its work tiles per KV head, and about how many tiles of keys
// they have.
struct Share {
  unsigned key;
  bool is_long;
  int pieces, work;
};
template <class S>
__device__ __forceinline__ Share share_of(const AttentionParams& p, const Sequence& seq) {
  const bool is_long = seq.queries * p.group > 64;
  const unsigned tiles = static_cast<unsigned>(cdiv(max(seq.context, 0), S::kKeys));
  int pieces = seq.queries > 0;
  unsigned work = pieces * tiles;
  if (is_long) {
    pieces = quotient(seq.queries + p.tile_q - 1, p.tile_q, p.by_tile_q);
    work = pieces * (tiles - min(tiles, static_cast<unsigned>(seq.queries / (2 * S::kKeys))));
  }
  return {min(tiles, 0xfffffu) | (is_long ? 1u << 20 : 0), is_long, pieces,
          static_cast<int>(min(work, 1u << 20))};
}

// Allocates units of the workspace to the parts of short sequences, longest first, until none is left. By the
// scheduler warp.
template <class S>
__device__ __forceinline__ void allocate_units(const AttentionParams& p, uint8_t* smem) {
  const int4* order = reinterpret_cast<const int4*>(smem + S::kOrder);
  const int lane = threadIdx.x % 32;
  int* units = reinterpret_cast<int*>(smem + S::kUnits);
  int used = 0;
#pragma unroll 1
  for (int base = reinterpret_cast<const int*>(smem + S::kTotals)[kLong]; base < p.seqs; base += 32) {
    int wanted = 0;
    if (base + lane < p.seqs) {
      const int4 o = order[base + lane];
      const int2 tiles = visible_tiles<S>(p, o.z - o.y, o.y);
      const int parts = parts_of(p, tiles.x, tiles.y).count;
      if (o.y > 0 && parts > 1) wanted = parts * p.kv_heads * cdiv(o.y * p.group, 16);
    }
    int sum = wanted;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += other;
    }
    if (base + lane < p.seqs)
      units[base + lane] = wanted > 0 && used + sum <= p.unit_count ? used + sum - wanted : -1;
    used = min(used + __shfl_sync(0xffffffffu, sum, 31), p.unit_count + 1);
  }
  __syncwarp();
}

// Sorts up to kFew sequences, and counts the long ones, and work tiles and tiles of keys of both kinds. By the
// scheduler warp, which alone needs the order: no barrier of all threads is between a length and the first copy, and
// each length is read once.
template <class S>
__device__ __forceinline__ void sort_few(const AttentionParams& p, uint8_t* smem) {
  const int lane = threadIdx.x & 31;
  Sequence seq{0, 0, 0, lane};
  if (lane < p.seqs) seq = sequence_at(p, lane);
  const Share share = share_of<S>(p, seq);
  int rank = 0;
#pragma unroll 1
  for (int o = 0; o < p.seqs; ++o) {
    const unsigned other = __shfl_sync(0xffffffffu, share.key, o);
    rank += other > share.key || (other == share.key && o < lane);
  }
  if (lane < p.seqs)
    reinterpret_cast<int4*>(smem + S::kOrder)[rank] =
        make_int4(seq.token, seq.queries, seq.context, seq.index);
  int counts[] = {share.is_long, share.is_long ? share.pieces : 0, share.is_long ? share.work : 0,
                  share.is_long ? 0 : share.pieces, share.is_long ? 0 : share.work};
  static_assert(kLong == 0 && kShortWork == 4, "the order of counts");
#pragma unroll
  for (int i = 0; i < 5; ++i) counts[i] = __reduce_add_sync(0xffffffffu, counts[i]);
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < 5; ++i) reinterpret_cast<int*>(smem + S::kTotals)[i] = counts[i];
  }
  __syncwarp();
  if (counts[kLong] < p.seqs) allocate_units<S>(p, smem);
}

// Before a kernel waits for the one ahead of it, by all threads. Ends with a barrier.
template <class S>
__device__ __forceinline__ void clear_totals(uint8_t* smem) {
  if (threadIdx.x < 8) reinterpret_cast<int*>(smem + S::kTotals)[threadIdx.x] = 0;
  __syncthreads();
}

// As sort_few for up to kSorted sequences, by all threads; up to kFew are left to the scheduler warp, and nothing is to
// be sorted of a single long sequence. After clear_totals.
template <class S>
__device__ __forceinline__ void sort_sequences(const AttentionParams& p, uint8_t* smem) {
  int4* order = reinterpret_cast<int4*>(smem + S::kOrder);
  unsigned* costs = reinterpret_cast<unsigned*>(smem + S::kCosts);
  int* totals = reinterpret_cast<int*>(smem + S::kTotals);
  const int tid = threadIdx.x;
  if (p.seqs <= kFew) {
    if (tid / 32 != S::kGroups * 4) return;  // the first producer warp
    if (only_sequence(p).queries == 0)
      sort_few<S>(p, smem);
    else
      totals[kLongTiles] = 1;
    return;
  }
  if (p.seqs > kSorted) return;
  constexpr int kPerThread = (kSorted + S::kThreads - 1) / S::kThreads;
#pragma unroll 1
  for (int j = 0; j < kPerThread; ++j) {
    const int i = tid + j * S::kThreads;
    if (i < p.seqs) {
      const Share share = share_of<S>(p, sequence_at(p, i));
      costs[i] = share.key;
      if (share.is_long) atomicAdd(totals + kLong, 1);
      atomicAdd(totals + (share.is_long ? kLongTiles : kShortTiles), share.pieces);
      atomicAdd(totals + (share.is_long ? kLongWork : kShortWork), share.work);
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int j = 0; j < kPerThread; ++j) {
    const int i = tid + j * S::kThreads;
    if (i < p.seqs) {
      const unsigned cost = costs[i];
      int rank = 0;
      for (int o = 0; o < p.seqs; ++o) rank += costs[o] > cost || (costs[o] == cost && o < i);
      const Sequence seq = sequence_at(p, i);
      order[rank] = make_int4(seq.token, seq.queries, seq.context, seq.index);
    }
  }
  __syncthreads();
  if (tid / 32 == S::kGroups * 4) allocate_units<S>(p, smem);
}

// Makes `work` the queries of a sequence from `begin` on, of KV head `head`, over all their keys.
template <class S>
__device__ __forceinline__ void set_tile(const AttentionParams& p, Work& work, const Sequence& seq, int head,
                                         int begin) {
  const int queries = min(p.tile_q, seq.queries - begin);
  work.seq = seq.index, work.head = head;
  work.token = seq.token + begin, work.rows = queries * p.group;
  work.position = seq.context - seq.queries + begin, work.end = max(0, work.position + queries);
  work.part_of_parts = 1 << 8, work.unit = -1;
  const int2 seen = visible_tiles<S>(p, work.position, queries);
  work.first = seen.x, work.count = seen.y - seen.x;
}

// State of one queue: its sequences rank .. end are left, and `base` work tiles come before them.
struct Queue {
  int rank, end, base;
};

// Work tile `item` of a queue; false past its end. By a whole warp.
template <class S>
__device__ __forceinline__ bool locate(const AttentionParams& p, const uint8_t* smem, Queue& queue, int item,
                                       bool is_short, Work& work) {
  const int4* order = reinterpret_cast<const int4*>(smem + S::kOrder);
  const int lane = threadIdx.x & 31;
  while (queue.rank < queue.end) {
    const bool one = queue.end - queue.rank == 1;  // then every lane has it
    const int at = queue.rank + (one ? 0 : lane);
    Sequence seq{0, 0, 0, 0};
    int unit = -1, parts = 1;
    if (at < queue.end) {
      if (p.seqs > kSorted) {
        seq = sequence_at(p, at);
      } else {
        const int4 o = order[at];
        seq = {o.x, o.y, o.z, o.w};
        if (is_short) unit = reinterpret_cast<const int*>(smem + S::kUnits)[at];
      }
      if (seq.queries * p.group <= 64) {
        const int2 tiles = visible_tiles<S>(p, seq.context - seq.queries, seq.queries);
        parts = parts_of(p, tiles.x, tiles.y).count;
      }
    }
    const int pieces =
        quotient(seq.queries + p.tile_q - 1, p.tile_q, p.by_tile_q) * p.kv_heads * (unit >= 0 ? parts : 1);
    int sum = pieces;
    if (!one) {
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += other;
      }
    }
    const unsigned past = __ballot_sync(0xffffffffu, queue.base + sum > item);
    if (past == 0) {
      queue.base += __shfl_sync(0xffffffffu, sum, 31), queue.rank += 32;
      continue;
    }
    const int from = __ffs(past) - 1;
    queue.base += __shfl_sync(0xffffffffu, sum - pieces, from), queue.rank += from;
    seq.token = __shfl_sync(0xffffffffu, seq.token, from);
    seq.queries = __shfl_sync(0xffffffffu, seq.queries, from);
    seq.context = __shfl_sync(0xffffffffu, seq.context, from);
    seq.index = __shfl_sync(0xffffffffu, seq.index, from);
    unit = __shfl_sync(0xffffffffu, unit, from), parts = __shfl_sync(0xffffffffu, parts, from);
    const int tiles = quotient(seq.queries + p.tile_q - 1, p.tile_q, p.by_tile_q);
    const int within = item - queue.base, before = quotient(within, p.kv_heads, p.by_kv_heads);
    const int begin = parts > 1 ? 0 : (tiles - 1 - before) * p.tile_q;  // most keys first
    set_tile<S>(p, work, seq, within - before * p.kv_heads, begin);
    if (parts > 1) {  // then there is one tile of queries
      work.part_of_parts = parts << 8;
      if (unit >= 0) work.unit = unit + work.head * parts * cdiv(work.rows, 16);
      select_part<S>(p, work, unit >= 0 ? before : 0);
    }
    return true;
  }
  return false;
}

// Dynamic persistent scheduler: fetches work tiles from one queue until it is empty, then from the other. The
// next one is fetched when the last keys of a tile are copied: the consumers have two tiles of keys left, and no CTA
// holds a work tile for long that an idle one could begin. By the scheduler warp, the first one of those that copy.
template <class S>
struct TileScheduler {
  Queue long_queue, short_queue;
  unsigned long_tiles, short_tiles;  // 0 once all are fetched
  int kind, item;                    // kind: 1 for short; in the first lane
  int starting_short;                // CTAs that begin with the short queue
  __device__ __forceinline__ TileScheduler(const AttentionParams& p, const uint8_t* smem, bool is_scheduler) {
    kind = item = starting_short = 0;
    const int* totals = reinterpret_cast<const int*>(smem + S::kTotals);
    const bool sorted = is_scheduler && p.seqs <= kSorted;
    const int count = sorted ? totals[kLong] : p.seqs;
    long_queue = {0, count, 0}, short_queue = {count, p.seqs, 0};
    long_tiles = sorted ? totals[kLongTiles] : 1, short_tiles = sorted ? totals[kShortTiles] : 0;
    if (!is_scheduler) return;
    // CTAs are divided between the queues by expected time, but at most 5/8 of them start with decodes: more would
    // not read faster. Each begins with the tile of its own number, and fetches those after them from the counters.
    const int ctas = static_cast<int>(gridDim.x), cta = static_cast<int>(blockIdx.x);
    starting_short = short_tiles == 0 ? 0 : ctas;
    if (short_tiles != 0 && long_tiles != 0) {  // the division takes its time
      const int64_t reading = int64_t(totals[kShortWork]) * p.reading,
                    multiplying = int64_t(totals[kLongWork]) * 8;
      starting_short = static_cast<int>(
          min(reading * ctas / max(reading + multiplying, int64_t(1)), int64_t(ctas * 5 / 8)));
    }
    kind = cta < starting_short;
    item = kind ? cta : cta - starting_short;
  }
  // Once for each tile, before `next`: fetches the tile after it, unless that is another part of its context.
  __device__ __forceinline__ void fetch_after(const AttentionParams& p, const Work& work) {
    if (work.rows > 0 && !has_more_parts(work)) fetch(p);
  }
  __device__ __forceinline__ static bool has_more_parts(const Work& work) {
    return work.unit < 0 && work.part() + 1 < work.parts();
  }
  __device__ __forceinline__ void fetch(const AttentionParams& p) {
    if ((threadIdx.x & 31) != 0) return;
    if ((kind == 0 ? long_tiles : short_tiles) == 0) kind ^= 1;
    item = static_cast<int>(atomicAdd(p.counters + kind, 1u)) +
           (kind ? starting_short : static_cast<int>(gridDim.x) - starting_short);
  }
  // work: the tile before, replaced by the next one.
  __device__ __forceinline__ void next(const AttentionParams& p, const uint8_t* smem, Work& work) {
    if (has_more_parts(work)) {
      select_part<S>(p, work, work.part() + 1);
      return;
    }
    // The tiles of an only_sequence follow from it without an order and its counts, by far fewer instructions: the first
    // copy waits for them, and each runs once, from a cold instruction cache. No state says which case it is, since the
    // copying warps have no register left.
    if (p.seqs == 1) {
      const Sequence only = only_sequence(p);
      if (only.queries > 0) {
        const int at = __shfl_sync(0xffffffffu, item, 0), before = quotient(at, p.kv_heads, p.by_kv_heads);
        const int tile = quotient(only.queries - 1, p.tile_q, p.by_tile_q) - before;  // most keys first
        if (tile < 0)
          end(work);
        else
          set_tile<S>(p, work, only, at - before * p.kv_heads, tile * p.tile_q);
        return;
      }
    }
    while (true) {
      const bool is_short = __shfl_sync(0xffffffffu, kind, 0) != 0;
      Queue queue = is_short ? short_queue : long_queue;
      const bool found = locate<S>(p, smem, queue, __shfl_sync(0xffffffffu, item, 0), is_short, work);
      if (is_short) {
        short_queue = queue;
        if (!found) short_tiles = 0;
      } else {
        long_queue = queue;
        if (!found) long_tiles = 0;
      }
      if (found) return;
      if (long_tiles == 0 && short_tiles == 0) {
        end(work);
        return;
      }
      fetch(p);
    }
  }
  __device__ __forceinline__ static void end(Work& work) {
    work.rows = 0, work.count = 0, work.part_of_parts = 1 << 8;
  }
};

__device__ __forceinline__ void put_work(uint8_t* at, const Work& work) {
  int4* to = reinterpret_cast<int4*>(at);
  to[0] = make_int4(work.seq, work.head, work.token, work.rows);
  to[1] = make_int4(work.position, work.first, work.count, work.end);
  reinterpret_cast<int2*>(to + 2)[0] = make_int2(work.part_of_parts, work.unit);
}

__device__ __forceinline__ Work get_work(const uint8_t* at) {
  const int4* from = reinterpret_cast<const int4*>(at);
  const int4 a = from[0], b = from[1];
  const int2 c = *reinterpret_cast<const int2*>(from + 2);
  return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w, static_cast<uint32_t>(c.x), c.y};
}

}  // namespace gm
#endif
