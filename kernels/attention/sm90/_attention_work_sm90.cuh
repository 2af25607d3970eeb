// Tile scheduler of attention on Hopper: which rows and which tiles of keys a CTA processes next, found on
// the device.
#pragma once
#include <cstdint>

#include "_attention_types_sm90.cuh"

namespace gm {

constexpr int kSorted = 512;  // sequences up to which the work is sorted, longest first
// Counters, all zero between launches: next piece of prefill, next piece of decode, finished CTAs; from
// kArrivals on, per unit of the workspace, how many parts of a context have arrived.
constexpr int kArrivals = 32;
// Contexts of sequences with few rows are cut into at most so many parts.
constexpr int kMostParts = 16;
constexpr int kTaking = 8;  // the warp that takes the work: the first of those that copy

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
  int part_tiles;   // tiles of keys of a part of a context, about
  int shared_rows;  // rows up to which the warpgroups share the keys of a work tile: 64 or 0
  int reading;      // weight of a tile of keys of a decode against one of a prefill, in eighths
  uint32_t by_page, by_group;
  float scale, scale_log2;
  // Of caches of e4m3 codes, whose sums are log2-scaled (scale_log2 is 1):
  const float *k_scale, *v_scale;
  // Strides of the scales in elements, 0 for a scale in common.
  int64_t k_scale_block, k_scale_slot, k_scale_head, v_scale_block, v_scale_slot, v_scale_head;
  float score_scale;
  int by_token, bf16;  // a scale per token and head; q and out are bf16, else fp16
};

// n / d for 0 <= n < 2^31 by reciprocal(d).
constexpr uint32_t reciprocal(int d) { return 0xffffffffu / static_cast<uint32_t>(d); }

template <int D>
struct AttentionShape {
  static constexpr int kRows = 128, kKeys = 128, kStages = 2, kThreads = 384;
  static constexpr int kQ = kRows * D * 2, kTile = kKeys * D * 2, kStaging = kRows * D * 2;
  static constexpr int kK = kQ, kV = kK + kStages * kTile, kOut = kV + kStages * kTile;
  static constexpr int kSums = kOut + kStaging;  // of the second warpgroup: maximum and sum of 64 rows
  static constexpr int kOrder = kSums + 64 * 8;  // sequences in the order of work
  static constexpr int kWeights = kOrder + kSorted * 16;  // what they are ordered by
  static constexpr int kUnits = kWeights + kSorted * 4;   // first unit of the sequences in the order of work
  static constexpr int kWork = kUnits + kSorted * 4;  // of the consumer warps, and two of the copying ones
  static constexpr int kShare = kWork + 3 * 48;
  static constexpr int kRowScales = kShare + 32;             // of caches of codes: a row's scores log2-scaled
  static constexpr int kKeyScales = kRowScales + kRows * 4;  // of four tiles of keys, where each has its own
  static constexpr int kBars = kKeyScales + 4 * kKeys * 12;
  static constexpr int kUnit = (D / 8 + 1) * 128;  // floats of a unit of the workspace
  static constexpr int kBytes = kBars + (6 + 4 * kStages) * 8;
  // Codes of a row are copied to where its second half, or its last 64 bytes, will be as fp16.
  static constexpr int kCodes = D == 64 ? 64 : kKeys * 128;
  static constexpr int kCopying = D / 32;  // warps: one for each 64 elements of keys and of values
  // As _flash_sm90.cuh names them.
  static constexpr int kQueryDim = D, kValueDim = D, kKeyTile = kTile, kValueTile = kTile, kWorkBars = 4;
  static constexpr bool kKeepsQ = false;
  static constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
};

// Heads of 136 to 256 elements, padded to 256 in shared memory.
template <>
struct AttentionShape<256> {
  static constexpr int kRows = 128, kKeys = 64, kStages = 2, kThreads = 384, D = 256;
  static constexpr int kQ = kRows * D * 2, kTile = kKeys * D * 2;
  static constexpr int kOut = 0;  // staging of results, and of sums that join: in the place of Q
  static constexpr int kK = kQ, kV = kK + kStages * kTile;
  static constexpr int kSums = kV + kStages * kTile;
  static constexpr int kOrder = kSums + 64 * 8;
  static constexpr int kWeights = kOrder + kSorted * 16;
  static constexpr int kUnits = kWeights + kSorted * 4;
  static constexpr int kWork = kUnits + kSorted * 4;
  static constexpr int kShare = kWork + 3 * 48;
  static constexpr int kBars = kShare + 32;
  static constexpr int kUnit = (D / 8 + 1) * 128;
  static constexpr int kBytes = kBars + (6 + 4 * kStages) * 8;
  static constexpr int kCopying = 4;  // warps: two for keys, two for values
  static constexpr int kQueryDim = D, kValueDim = D, kKeyTile = kTile, kValueTile = kTile, kWorkBars = 4;
  static constexpr bool kKeepsQ = true;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
};

}  // namespace gm

#ifdef __CUDACC__
namespace gm {

__device__ __forceinline__ int quotient(int n, int d, uint32_t reciprocal) {
  const int q = __umulhi(n, reciprocal);  // right or one too small
  return q + (n - q * d >= d);
}

// A work tile: the query heads of one KV head for up to tile_q queries of a sequence.
struct Work {
  int seq, head;     // head: of the KV heads
  int token, rows;   // the first query in q; query-head pairs, 0 at the end of all work
  int position;      // of the first query
  int first, count;  // tiles of keys: `count` of them, down to `first`
  int end;           // keys that exist
  // Parts of the context, more than one only of sequences with at most 64 rows, and which this is, in one
  // word: the consumer warps have no registers to spare.
  uint32_t part_of_parts;
  int unit;  // first unit of the parts, < 0 if this CTA takes all of them in turn
  __device__ __forceinline__ int part() const { return part_of_parts & 255; }
  __device__ __forceinline__ int parts() const { return part_of_parts >> 8; }
  __device__ __forceinline__ bool last_part() const { return part() + 1 == parts(); }
};

// Split of a context of which tiles first .. stop are seen into parts of about p.part_tiles tiles, or more
// where there would be more than kMostParts parts. The split depends on its own context alone, so that a
// row's result does not depend on the batch.
struct Parts {
  int tiles, before, count;  // before: parts that lie before `first`
};
__device__ __forceinline__ Parts parts_of(const AttentionParams& p, int first, int stop) {
  Parts parts;
  const int most = min(kMostParts, max(1, stop / p.part_tiles));
  parts.tiles = max(1, cdiv(stop, most));
  parts.before = first / parts.tiles;
  parts.count = max(1, cdiv(stop, parts.tiles) - parts.before);
  return parts;
}

// Tiles that queries position .. position + queries see.
template <int D>
__device__ __forceinline__ int2 visible_tiles(const AttentionParams& p, int position, int queries) {
  constexpr int kKeys = AttentionShape<D>::kKeys;
  const int first = p.window > 0 ? max(0, position - p.window + 1) / kKeys : 0;
  return make_int2(first, max(first, cdiv(max(0, position + queries), kKeys)));
}

// Restricts a work tile to one of its parts.
template <int D>
__device__ __forceinline__ void take_part(const AttentionParams& p, Work& work, int part) {
  const int2 tiles = visible_tiles<D>(p, work.position, work.end - work.position);
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

// Results of sort_sequences in shared memory; kLast: whether the part of this CTA is the last of a context to
// arrive.
enum : int { kLong, kLongPieces, kLongWork, kShortPieces, kShortWork, kLast };

// Sorts the sequences: those with more than 64 rows ("long") first, within each kind longest context first.
// Says how many are long, and of both kinds how many work tiles a KV head has and how many tiles of keys,
// about, are in them.
template <int D>
__device__ __forceinline__ void sort_sequences(const AttentionParams& p, uint8_t* smem) {
  using S = AttentionShape<D>;
  int4* order = reinterpret_cast<int4*>(smem + S::kOrder);
  unsigned* weights = reinterpret_cast<unsigned*>(smem + S::kWeights);
  int* share = reinterpret_cast<int*>(smem + S::kShare);
  const int tid = threadIdx.x;
  if (tid < 8) share[tid] = 0;
  __syncthreads();
  if (p.seqs > kSorted) return;
  constexpr int kMine = (kSorted + S::kThreads - 1) / S::kThreads;
#pragma unroll 1
  for (int j = 0; j < kMine; ++j) {
    const int i = tid + j * S::kThreads;
    if (i < p.seqs) {
      const Sequence seq = sequence_at(p, i);
      const bool many = seq.queries * p.group > 64;
      const unsigned tiles = static_cast<unsigned>(cdiv(max(seq.context, 0), S::kKeys));
      weights[i] = min(tiles, 0xfffffu) | (many ? 1u << 20 : 0);
      if (many) {
        const int pieces = cdiv(seq.queries, p.tile_q);
        const unsigned work =
            pieces * (tiles - min(tiles, static_cast<unsigned>(seq.queries / (2 * S::kKeys))));
        atomicAdd(share + kLong, 1), atomicAdd(share + kLongPieces, pieces);
        atomicAdd(share + kLongWork, static_cast<int>(min(work, 1u << 20)));
      } else if (seq.queries > 0) {
        atomicAdd(share + kShortPieces, 1),
            atomicAdd(share + kShortWork, static_cast<int>(min(tiles, 1u << 20)));
      }
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int j = 0; j < kMine; ++j) {
    const int i = tid + j * S::kThreads;
    if (i < p.seqs) {
      const unsigned weight = weights[i];
      int rank = 0;
      for (int o = 0; o < p.seqs; ++o) rank += weights[o] > weight || (weights[o] == weight && o < i);
      const Sequence seq = sequence_at(p, i);
      order[rank] = make_int4(seq.token, seq.queries, seq.context, seq.index);
    }
  }
  __syncthreads();
  // Allocates units of the workspace for the parts of short sequences, longest first, until none is left. By
  // the warp that fetches work.
  if (tid / 32 != kTaking) return;
  const int lane = tid % 32;
  int* units = reinterpret_cast<int*>(smem + S::kUnits);
  int used = 0;
  for (int base = share[kLong]; base < p.seqs; base += 32) {
    int wanted = 0;
    if (base + lane < p.seqs) {
      const int4 o = order[base + lane];
      const int2 tiles = visible_tiles<D>(p, o.z - o.y, o.y);
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

// State of one queue of work: its sequences rank .. end are left, and `base` pieces come before them.
struct Queue {
  int rank, end, base;
};

// Finds piece `item` of a queue; false past its end. By a whole warp.
template <int D>
__device__ __forceinline__ bool locate(const AttentionParams& p, const uint8_t* smem, Queue& queue, int item,
                                       bool is_short, Work& work) {
  using S = AttentionShape<D>;
  const int4* order = reinterpret_cast<const int4*>(smem + S::kOrder);
  const int lane = threadIdx.x & 31;
  while (queue.rank < queue.end) {
    const int at = queue.rank + lane;
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
        const int2 tiles = visible_tiles<D>(p, seq.context - seq.queries, seq.queries);
        parts = parts_of(p, tiles.x, tiles.y).count;
      }
    }
    const int pieces = cdiv(seq.queries, p.tile_q) * p.kv_heads * (unit >= 0 ? parts : 1);
    int sum = pieces;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += other;
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
    const int tiles = cdiv(seq.queries, p.tile_q), within = item - queue.base;
    const int before = within / p.kv_heads;
    const int begin = parts > 1 ? 0 : (tiles - 1 - before) * p.tile_q;  // the longest first
    const int queries = min(p.tile_q, seq.queries - begin);
    work.seq = seq.index, work.head = within - before * p.kv_heads;
    work.token = seq.token + begin, work.rows = queries * p.group;
    work.position = seq.context - seq.queries + begin, work.end = work.position + queries;
    work.part_of_parts = parts << 8, work.unit = -1;
    if (parts > 1) {  // of one tile of queries
      if (unit >= 0) work.unit = unit + work.head * parts * cdiv(work.rows, 16);
      take_part<D>(p, work, unit >= 0 ? before : 0);
    } else {
      const int2 seen = visible_tiles<D>(p, work.position, queries);
      work.first = seen.x, work.count = seen.y - seen.x;
    }
    work.end = max(0, work.end);
    return true;
  }
  return false;
}

// Fetches work tiles, of one queue until it is empty and then of the other; requests the next one ahead
// of time.
template <int D>
struct Taker {
  Queue long_queue, short_queue;
  unsigned long_pieces, short_pieces;  // 0 once all are taken
  int kind, item;                      // kind: 1 for short; in the first lane
  __device__ __forceinline__ Taker(const AttentionParams& p, const uint8_t* smem, bool takes = true) {
    const int* share = reinterpret_cast<const int*>(smem + AttentionShape<D>::kShare);
    const bool sorted = p.seqs <= kSorted;
    const int many = sorted ? share[kLong] : p.seqs;
    long_queue = {0, many, 0}, short_queue = {many, p.seqs, 0};
    long_pieces = sorted ? share[kLongPieces] : 1, short_pieces = sorted ? share[kShortPieces] : 0;
    kind = item = 0;
    if (!takes) return;
    // CTAs are divided between the queues by expected time, but no more of them read than saturate the
    // memory.
    const int64_t reading = sorted ? int64_t(share[kShortWork]) * p.reading : 0,
                  multiplying = sorted ? int64_t(share[kLongWork]) * 8 : 1;
    const int first = static_cast<int>(
        min(reading * gridDim.x / max(reading + multiplying, int64_t(1)), int64_t(gridDim.x * 5 / 8)));
    kind = (static_cast<int>(blockIdx.x) < first || long_pieces == 0) && short_pieces > 0;
    if ((threadIdx.x & 31) == 0) item = static_cast<int>(atomicAdd(p.counters + kind, 1u));
  }
  __device__ __forceinline__ void ask(const AttentionParams& p) {
    if ((threadIdx.x & 31) != 0) return;
    if ((kind == 0 ? long_pieces : short_pieces) == 0) kind ^= 1;
    item = static_cast<int>(atomicAdd(p.counters + kind, 1u));
  }
  // work: in, the piece before.
  __device__ __forceinline__ void take(const AttentionParams& p, const uint8_t* smem, Work& work) {
    if (work.unit < 0 && work.part() + 1 < work.parts()) {
      take_part<D>(p, work, work.part() + 1);
      return;
    }
    while (true) {
      const bool is_short = __shfl_sync(0xffffffffu, kind, 0) != 0;
      Queue queue = is_short ? short_queue : long_queue;
      const bool found = locate<D>(p, smem, queue, __shfl_sync(0xffffffffu, item, 0), is_short, work);
      if (is_short) {
        short_queue = queue;
        if (!found) short_pieces = 0;
      } else {
        long_queue = queue;
        if (!found) long_pieces = 0;
      }
      if (found) break;
      if (long_pieces == 0 && short_pieces == 0) {
        work.rows = 0, work.count = 0, work.part_of_parts = 1 << 8;
        return;
      }
      ask(p);
    }
    ask(p);
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
