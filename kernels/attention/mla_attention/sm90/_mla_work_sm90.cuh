// Tile scheduler of latent attention on Hopper: which rows and which keys a CTA processes, found on the
// device.
//
// A task is a block of 64 rows, which are (query, head) pairs, of one sequence. If the load is then about
// even, every task is cut into the same number of parts (or left whole), which are dealt out. Otherwise the
// tiles of keys of all tasks, one task after the other, are cut into as many equal ranges as there are CTAs.
// A CTA takes the next range by a counter, until none is left. Only then are contexts that were cut merged: a
// CTA waits only for CTAs that are running.
#pragma once
#include "attention/sm90/_attention_work_sm90.cuh"

namespace gm::mla {

constexpr int kMostCtas = 512;  // of a launch
// Words of the workspace, all of them zero between launches: ranges taken, CTAs that are done, and from
// kArrivals on, for each CTA, arrivals at the task that was cut first in its range.
enum : int { kTicket, kDone, kMlaCounters = kArrivals + kMostCtas };

struct MlaParams {
  void* out;
  float* lse;  // [tokens, heads] or null
  const int *table, *query_start, *seq_lens;
  unsigned* counters;
  float* parts;       // [2 per CTA][64 rows][512]: sums of a part of a context
  float* part_sums;   // [2 per CTA][64 rows][2]: maximum, in units of log2, and sum of the weights
  const void* cache;  // for pages that are not copied as boxes
  int64_t cache_block, cache_slot;  // strides, in elements
  int64_t table_row, out_token, out_head;
  int seqs, heads, blocks, page;
  int q_rows;  // rows of a box of queries
  int box;     // keys of a box of the cache
  int least;   // tiles that are worth a range of their own
  int slack;   // tiles over an even share that dealing out is worth; below 0: contexts are never cut
  uint32_t by_page, by_heads;
  float scale_log2;
};

struct MlaShape {
  static constexpr int kRows = 64, kKeys = 64, kThreads = 384, kSlots = 2;
  static constexpr int kLatent = 512, kHalf = kLatent / 2;
  static constexpr int kColumns = 64 * 128;        // bytes of 64 rows of 64 elements
  static constexpr int kHalfBytes = 4 * kColumns;  // of half of the latents of a tile of keys
  static constexpr int kParts = 3, kRotated = 2;   // of a tile: halves of the latents, rotated elements
  static constexpr int kTile = 9 * kColumns;
  static constexpr int kQ = 0, kTiles = kTile;
  static constexpr int kMaxima = kTiles + kSlots * kTile;  // of a warpgroup's last tile: [2][64]
  static constexpr int kSums = kMaxima + 2 * 64 * 4;       // of the weights: [2, in turn][2][64]
  static constexpr int kWork = kSums + 2 * 2 * 64 * 4;
  static constexpr int kTickets = kWork + 64;  // two, in turn
  static constexpr int kBars = kTickets + 16;
  static constexpr int kTaken = kBars + 192;  // ranges that this CTA took
  static constexpr int kBytes = kTaken + kMostCtas * 2;
};

}  // namespace gm::mla

#ifdef __CUDACC__
namespace gm::mla {

enum : int { kStop, kAttend, kMerge };

// Work item of the consumer warpgroups. slot: of the workspace, for the sums of a part; -1 for a whole
// context.
struct MlaWork {
  int kind, token, row0, rows;  // first token of the sequence; first row of it and how many are this CTA's
  int position, first, count, end;  // of the first token; tiles of keys; keys that exist
  int slot, part, parts, first_range;
};

__device__ __forceinline__ void put_work(uint8_t* at, const MlaWork& w) {
  int4* to = reinterpret_cast<int4*>(at);
  to[0] = make_int4(w.kind, w.token, w.row0, w.rows);
  to[1] = make_int4(w.position, w.first, w.count, w.end);
  to[2] = make_int4(w.slot, w.part, w.parts, w.first_range);
}

__device__ __forceinline__ MlaWork get_mla_work(const uint8_t* at) {
  const int4* from = reinterpret_cast<const int4*>(at);
  const int4 a = from[0], b = from[1], c = from[2];
  return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w, c.x, c.y, c.z, c.w};
}

struct MlaSequence {
  int token, queries, context;
  int tasks, tiles;  // tiles of each task, as they are shared out
};

__device__ __forceinline__ MlaSequence mla_sequence(const MlaParams& p, int i) {
  if (i >= p.seqs) return {0, 0, 0, 0, 0};
  const int token = p.query_start[i], context = p.seq_lens[i], queries = max(0, p.query_start[i + 1] - token);
  return {token, queries, context, cdiv(queries * p.heads, MlaShape::kRows),
          queries > 0 ? max(1, cdiv(context, MlaShape::kKeys)) : 0};
}

// The plan of a launch, the same in every CTA, and a place in the order of tasks. By a whole warp. The host
// has checked that there are no 2^31 tiles.
class MlaPlan {
 public:
  __device__ __forceinline__ explicit MlaPlan(const MlaParams& p) : p_(p) {
    unsigned tiles = 0;
    int tasks = 0, most = 0;
#pragma unroll 1
    for (chunk_ = 0; chunk_ < p.seqs; chunk_ += 32) {
      seq_ = mla_sequence(p, chunk_ + lane());
      tiles += seq_.tasks * seq_.tiles, tasks += seq_.tasks, most = max(most, seq_.tiles);
    }
    chunk_ -= 32;
    tiles = __reduce_add_sync(0xffffffffu, tiles), tasks = __reduce_add_sync(0xffffffffu, tasks);
    most = __reduce_max_sync(0xffffffffu, most);
    const unsigned ctas = gridDim.x;
    parts_ = 1;
    unsigned longest = most;  // queue of tiles where tasks are dealt out
    if (tasks > ctas)
      longest *= (tasks + ctas - 1) / ctas;
    else if (p.slack >= 0 && tasks > 0)
      parts_ = max(1u, min(ctas / tasks, (most + p.least - 1) / p.least)),
      longest = (most + parts_ - 1) / parts_;
    dealt_ = p.slack < 0 || longest <= tiles / ctas + p.slack;
    if (!dealt_) parts_ = 1;
    items_ = dealt_ ? tasks * parts_ : tiles;
    ranges_ = min(dealt_ ? items_ : (tiles + p.least - 1) / p.least, ctas);
    share_ = ranges_ > 0 ? items_ / ranges_ : 0, extra_ = items_ - share_ * ranges_;
    sum_tasks();
  }

  // Ranges of work, at most as many as CTAs.
  __device__ __forceinline__ int ranges() const { return ranges_; }

  __device__ __forceinline__ void start(int range) {
    range_ = range;
    item_ = dealt_ ? range : bound(range), end_ = dealt_ ? items_ : bound(range + 1);
    if (chunk_ != 0) load(0);
    base_ = 0;
  }

  // The next piece of the range; false past its end.
  __device__ __forceinline__ bool next(MlaWork& work, int& seq) {
    unsigned past;
    while (true) {
      if (item_ >= end_) return false;
      past = __ballot_sync(0xffffffffu, base_ + sum_ > item_);
      if (past != 0) break;
      base_ += __shfl_sync(0xffffffffu, sum_, 31);
      load(chunk_ + 32);
    }
    const int from = __ffs(past) - 1;
    const unsigned before = base_ + (from == 0 ? 0 : __shfl_sync(0xffffffffu, sum_, max(from - 1, 0)));
    const int token = __shfl_sync(0xffffffffu, seq_.token, from),
              queries = __shfl_sync(0xffffffffu, seq_.queries, from),
              context = __shfl_sync(0xffffffffu, seq_.context, from),
              tasks = __shfl_sync(0xffffffffu, seq_.tasks, from);
    const unsigned tiles = __shfl_sync(0xffffffffu, seq_.tiles, from);
    seq = chunk_ + from;
    const unsigned within = item_ - before, per = dealt_ ? parts_ : tiles;
    const unsigned task = tasks == 1 ? 0 : within / per,
                   place = within - task * per;  // part or tile of the task
    unsigned first = place, count = min(tiles - place, end_ - item_);
    work.slot = -1, work.part = 0, work.parts = 1, work.first_range = range_;
    if (dealt_) {
      first = 0, count = tiles;
      if (parts_ > 1) {
        first = tiles * place / parts_, count = tiles * (place + 1) / parts_ - first;
        work.part = place, work.parts = parts_, work.first_range = range_ - place;
      }
    } else if (count < tiles) {
      const unsigned begin = before + task * tiles;
      work.first_range = range_of(begin);
      work.part = range_ - work.first_range, work.parts = range_of(begin + tiles - 1) - work.first_range + 1;
    }
    if (work.parts > 1) work.slot = range_ * 2 + (work.part == 0);
    item_ += dealt_ ? ranges_ : count;

    work.kind = kAttend, work.token = token, work.position = context - queries;
    work.row0 = task * MlaShape::kRows;
    work.rows = min(MlaShape::kRows, queries * p_.heads - work.row0);
    // Keys that the last row sees; there may be fewer tiles of them than were scheduled.
    work.end = max(0, work.position + quotient(work.row0 + work.rows - 1, p_.heads, p_.by_heads) + 1);
    work.first = first;
    work.count = max(0, min(int(first + count), cdiv(work.end, MlaShape::kKeys)) - int(first));
    return true;
  }

 private:
  const MlaParams& p_;
  MlaSequence seq_;  // of this lane, in the chunk of 32 sequences that is at hand
  int chunk_;
  unsigned sum_;  // items of the chunk's sequences up to this lane's
  unsigned items_, ranges_, share_, extra_, item_, end_, base_;
  unsigned parts_;  // of each task, where tasks are dealt out
  int range_;
  bool dealt_;

  __device__ __forceinline__ static int lane() { return threadIdx.x & 31; }
  __device__ __forceinline__ void load(int chunk) {
    chunk_ = chunk;
    seq_ = mla_sequence(p_, chunk + lane());
    sum_tasks();
  }
  __device__ __forceinline__ void sum_tasks() {
    sum_ = seq_.tasks * (dealt_ ? parts_ : seq_.tiles);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const unsigned other = __shfl_up_sync(0xffffffffu, sum_, step);
      if (lane() >= step) sum_ += other;
    }
  }
  // Ranges have share_ tiles, the first extra_ of them one more.
  __device__ __forceinline__ unsigned bound(unsigned range) const {
    return range * share_ + min(range, extra_);
  }
  __device__ __forceinline__ int range_of(unsigned tile) const {
    const unsigned longer = extra_ * (share_ + 1);
    return tile < longer ? tile / (share_ + 1) : extra_ + (tile - longer) / share_;
  }
};

}  // namespace gm::mla
#endif
