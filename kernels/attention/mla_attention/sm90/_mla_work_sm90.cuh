// Tile scheduler of latent attention on Hopper: which rows and which keys a CTA processes, found on the
// device.
//
// A task is a block of 64 rows, which are (query, head) pairs, of one sequence. If that balances the load, every task
// is cut into the same number of parts (or left whole), which are assigned round-robin. Otherwise the tiles of keys
// of all tasks are cut into as many equal ranges as there are CTAs (stream-K). Where all sequences have the same few
// tasks, as decodes with 128 heads have, a range is one of the tiles of sequences, and a CTA takes it for one of their
// tasks, a lane: the CTAs of a range run at the same time and share its keys in the L2 cache. A CTA fetches the next
// range by an atomic counter, until none is left. Only then are contexts that were cut merged: a CTA waits only for
// CTAs that are running.
#pragma once
#include "attention/sm90/_attention_work_sm90.cuh"

namespace gm::mla {

constexpr int kMaxCtas = 512;  // per launch
// Counters of the workspace, all zero between launches: next range, finished CTAs, and from kArrivals on, for each
// range, arrivals at the task whose first part is in it.
enum : int { kTicket, kDone, kMlaCounters = kArrivals + kMaxCtas };
constexpr int kCounterBytes = 4096;  // of the workspace, before the parts of contexts
static_assert(kMlaCounters * 4 <= kCounterBytes);

struct MlaParams {
  void* out;
  float* lse;  // [tokens, heads] or null
  const int *table, *query_start, *seq_lens;
  unsigned* counters;
  float* parts;                     // [2 per CTA][64 rows][512]: sums of a part of a context
  float* part_sums;                 // [2 per CTA][64 rows][2]: maximum, log2-scaled, and sum of the weights
  const void* cache;                // for pages that are not copied as boxes
  int64_t cache_block, cache_slot;  // strides, in elements
  int64_t table_row, out_token, out_head;
  int seqs, heads, blocks, page;
  int q_rows;  // rows of a box of queries
  int box;     // keys of a box of the cache
  int least;   // minimum length of a range, in tiles
  int slack;  // round-robin is chosen up to so many tiles over an even share; below 0: contexts are never cut
  uint32_t by_page, by_heads;
  float scale_log2;
};

struct MlaShape {
  static constexpr int kRows = 64, kKeys = 64, kThreads = 384, kSlots = 2;
  static constexpr int kLatent = 512, kHalf = kLatent / 2;
  static constexpr int kWidth = kLatent + 64;  // elements of a key: its latents, then the rotated ones
  // Bytes of the workspace for a part of a context: sums of values, then maximum and sum of weights of each row.
  static constexpr int kPartBytes = kRows * (kLatent + 2) * 4;
  static constexpr int kColumns = 64 * 128;        // bytes of 64 rows of 64 elements
  static constexpr int kHalfBytes = 4 * kColumns;  // of half of the latents of a tile of keys
  // Parts of a tile: two halves of the latents, and the rotated elements.
  static constexpr int kParts = 3, kRotated = 2;
  static constexpr int kTile = 9 * kColumns;
  static constexpr int kQ = 0, kTiles = kTile;
  static constexpr int kMaxima = kTiles + kSlots * kTile;  // row maxima of a warpgroup's last tile: [2][64]
  static constexpr int kSums = kMaxima + 2 * 64 * 4;       // sums of weights: [2 buffers][2][64]
  static constexpr int kWork = kSums + 2 * 2 * 64 * 4;
  static constexpr int kTickets = kWork + 64;  // double-buffered
  static constexpr int kBars = kTickets + 16;
  static constexpr int kTaken = kBars + 192;  // ranges that this CTA processed
  static constexpr int kBytes = kTaken + kMaxCtas * 2;
};

}  // namespace gm::mla

#ifdef __CUDACC__
namespace gm::mla {

enum : int { kStop, kAttend, kMerge };

// Work of the consumer warpgroups. slot: of the workspace, for a part of a context; -1 for a whole one.
struct MlaWork {
  int kind, token, row0, rows;      // first token of the sequence; first of its rows, and how many
  int position, first, count, end;  // of the first token; tiles of keys; number of keys
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
  int tasks, tiles;  // tiles of keys of each task
};

__device__ __forceinline__ MlaSequence mla_sequence(const MlaParams& p, int i) {
  if (i >= p.seqs) return {0, 0, 0, 0, 0};
  const int token = p.query_start[i], context = p.seq_lens[i], queries = max(0, p.query_start[i + 1] - token);
  return {token, queries, context, cdiv(queries * p.heads, MlaShape::kRows),
          queries > 0 ? max(1, cdiv(context, MlaShape::kKeys)) : 0};
}

// The schedule of a launch, the same in every CTA, and a position in it. By a whole warp. The host has checked that
// there are fewer than 2^31 tiles.
class MlaScheduler {
 public:
  __device__ __forceinline__ explicit MlaScheduler(const MlaParams& p) : p_(p) {
    unsigned tiles = 0;
    int tasks = 0, max_tiles = 0, max_tasks = 0, some = 0;  // some: sequences that have tasks
#pragma unroll 1
    for (chunk_ = 0; chunk_ < p.seqs; chunk_ += 32) {
      seq_ = mla_sequence(p, chunk_ + lane());
      tiles += seq_.tasks * seq_.tiles, tasks += seq_.tasks, max_tiles = max(max_tiles, seq_.tiles);
      max_tasks = max(max_tasks, seq_.tasks), some += seq_.tasks > 0;
    }
    chunk_ -= 32;
    tiles = __reduce_add_sync(0xffffffffu, tiles), tasks = __reduce_add_sync(0xffffffffu, tasks);
    max_tiles = __reduce_max_sync(0xffffffffu, max_tiles);
    max_tasks = __reduce_max_sync(0xffffffffu, max_tasks), some = __reduce_add_sync(0xffffffffu, some);
    const unsigned ctas = gridDim.x;
    parts_ = lanes_ = 1;
    unsigned longest = max_tiles;  // most tiles of a CTA under round-robin
    if (tasks > ctas)
      longest *= (tasks + ctas - 1) / ctas;
    else if (p.slack >= 0 && tasks > 0)
      parts_ = max(1u, min(ctas / tasks, (max_tiles + p.least - 1) / p.least)),
      longest = (max_tiles + parts_ - 1) / parts_;
    round_robin_ = p.slack < 0 || longest <= tiles / ctas + p.slack;
    if (!round_robin_) parts_ = 1;
    // Few enough lanes that all CTAs but one in 32 have one.
    if (!round_robin_ && max_tasks > 1 && some * max_tasks == tasks && max_tasks * 8u <= ctas &&
        ctas % max_tasks * 32 <= ctas)
      lanes_ = max_tasks;
    items_ = round_robin_ ? tasks * parts_ : tiles / lanes_;
    per_lane_ = round_robin_ ? min(items_, ctas) : min((items_ + p.least - 1) / p.least, ctas / lanes_);
    share_ = per_lane_ > 0 ? items_ / per_lane_ : 0, extra_ = items_ - share_ * per_lane_;
    sum_tasks();
  }

  // Number of ranges, at most that of CTAs.
  __device__ __forceinline__ int ranges() const { return per_lane_ * lanes_; }

  // ticket: of the ranges in the order in which they are taken, the lanes of a range one after the other.
  __device__ __forceinline__ void start(int ticket) {
    const int range = lanes_ == 1 ? ticket : ticket / lanes_;
    lane_of_range_ = ticket - range * lanes_;
    range_ = lane_of_range_ * per_lane_ + range;  // those of a task are neighbours
    item_ = round_robin_ ? range : bound(range), end_ = round_robin_ ? items_ : bound(range + 1);
    if (chunk_ != 0) load(0);
    base_ = 0;
  }

  // The next work of the range; false past its end.
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
    const unsigned within = item_ - before, per = round_robin_ ? parts_ : tiles;
    const unsigned in_lane = tasks == 1 || lanes_ > 1 ? 0 : within / per, task = in_lane + lane_of_range_,
                   place = within - in_lane * per;  // part or tile of the task
    unsigned first = place, count = min(tiles - place, end_ - item_);
    work.slot = -1, work.part = 0, work.parts = 1, work.first_range = range_;
    if (round_robin_) {
      first = 0, count = tiles;
      if (parts_ > 1) {
        first = tiles * place / parts_, count = tiles * (place + 1) / parts_ - first;
        work.part = place, work.parts = parts_, work.first_range = range_ - place;
      }
    } else if (count < tiles) {
      const unsigned begin = before + in_lane * tiles;
      const int first_range = range_of(begin);
      work.first_range = lane_of_range_ * per_lane_ + first_range;
      work.part = range_ - work.first_range, work.parts = range_of(begin + tiles - 1) - first_range + 1;
    }
    if (work.parts > 1) work.slot = range_ * 2 + (work.part == 0);
    item_ += round_robin_ ? per_lane_ : count;

    work.kind = kAttend, work.token = token, work.position = context - queries;
    work.row0 = task * MlaShape::kRows;
    work.rows = min(MlaShape::kRows, queries * p_.heads - work.row0);
    // Keys visible to the last row, which may be fewer than were scheduled.
    work.end = max(0, work.position + quotient(work.row0 + work.rows - 1, p_.heads, p_.by_heads) + 1);
    work.first = first;
    work.count = max(0, min(int(first + count), cdiv(work.end, MlaShape::kKeys)) - int(first));
    return true;
  }

 private:
  const MlaParams& p_;
  MlaSequence seq_;  // of this lane, in the current chunk of 32 sequences
  int chunk_;
  unsigned sum_;  // prefix sum of the items of the chunk's sequences
  unsigned items_, per_lane_, share_, extra_, item_, end_, base_;  // items_, per_lane_ (ranges): of a lane
  unsigned parts_;                                                 // of each task under round-robin
  int lanes_;                                                      // 1: all tasks one after the other
  int range_, lane_of_range_;
  bool round_robin_;

  __device__ __forceinline__ static int lane() { return threadIdx.x & 31; }
  __device__ __forceinline__ void load(int chunk) {
    chunk_ = chunk;
    seq_ = mla_sequence(p_, chunk + lane());
    sum_tasks();
  }
  __device__ __forceinline__ void sum_tasks() {
    sum_ = lanes_ > 1 ? seq_.tiles : seq_.tasks * (round_robin_ ? parts_ : seq_.tiles);
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
