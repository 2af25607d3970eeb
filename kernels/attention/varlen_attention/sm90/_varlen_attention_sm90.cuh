// Attention over dense sequences for Hopper, keys and values of different widths: causal (un-absorbed MLA prefill), and
// in kernels of their own (WINDOW) bidirectional or with a window of keys before and after a query's own (encoders).
//
// FlashAttention-3's loop (_flash_sm90.cuh) with two consumer warpgroups and a producer warp. The scheduler is static
// and persistent, without counters or a workspace:
//  - the first and the last tile of queries of a sequence see about as many keys together as the second and the last but
//    one, and so on. Such pairs are the unit of work: all pairs of a sequence take the same time, so that pairs of
//    sorted sequences are sorted too. They are assigned to the CTAs in a serpentine order;
//  - the pairs of a head are neighbours, so that the CTAs share its keys and values in the L2 cache;
//  - a batch with less than a pair for each CTA is assigned by single tiles.
#pragma once
#include <cstdint>

#include "attention/sm90/_attention_parts_sm90.cuh"
#include "attention/sm90/_flash_sm90.cuh"
#include "attention/sm90/_soft_cap_sm90.cuh"

namespace gm {

constexpr int kSortedSequences = 512;  // largest number of sequences that are sorted

struct VarlenParams {
  void* out;
  float* lse;  // [tokens, heads] or null
  const int* query_start;
  const int* context_start;
  int64_t out_token, out_head;  // strides, in elements
  int seqs, heads, group, v_dim;
  float scale_log2;
  int left, right;  // keys before and after its own that a query sees, < 0 = all
};

// DK, DV: elements of a key and of a value, padded to whole multiples of 64 in shared memory.
template <int DK, int DV>
struct VarlenShape {
  static constexpr int kGroups = 2, kRows = 128, kKeys = 128, kStages = 2, kThreads = 384;
  static constexpr int kQueryDim = DK, kValueDim = DV, kWorkBars = 0;
  static constexpr bool kKeepsQ = false;
  static constexpr int kQ = kRows * DK * 2, kKeyTile = kKeys * DK * 2, kValueTile = kKeys * DV * 2;
  static constexpr int kK = kQ, kV = kK + kStages * kKeyTile;
  static constexpr int kOrder = kV + kStages * kValueTile;  // sequences in the order of work
  static constexpr int kCosts = kOrder + kSortedSequences * 16;
  static constexpr int kWork = kCosts + kSortedSequences * 4;
  static constexpr int kTotals = kWork + 32;
  static constexpr int kBars = kTotals + 16;
  static constexpr int kBytes = kBars + (2 + 4 * kStages) * 8;
};

}  // namespace gm

#ifdef __CUDACC__
namespace gm {

// A work tile, up to 128 queries of a head: the first one in q, how many (0: no more work), its position; the first
// row of the sequence in k and v, and how many rows are visible; the first tile of keys that is.
struct VarlenTile {
  int token, rows, position, key, end, head, first;
};

// token, queries, key, context.
__device__ __forceinline__ int4 varlen_sequence(const VarlenParams& p, int i) {
  const int token = p.query_start[i], key = p.context_start[i];
  return make_int4(token, max(0, p.query_start[i + 1] - token), key, max(0, p.context_start[i + 1] - key));
}

// Tiles of keys that a pair of tiles of a sequence's queries sees; with a window, at most.
template <typename S, bool WINDOW>
__device__ __forceinline__ int pair_cost(const VarlenParams& p, const int4& seq) {
  if constexpr (WINDOW)
    return 2 * cdiv(p.left < 0 || p.right < 0 ? seq.w : min(seq.w, p.left + p.right + S::kRows), S::kKeys);
  else
    return cdiv(seq.w, S::kKeys) + cdiv(max(0, seq.w - seq.y), S::kKeys);
}

// Sorts the sequences by the keys that a pair of tiles sees, most keys first, and counts pairs and sequences. By all
// threads.
template <typename S, bool WINDOW>
__device__ __forceinline__ void sort_varlen(const VarlenParams& p, uint8_t* smem) {
  int4* const order = reinterpret_cast<int4*>(smem + S::kOrder);
  int* const costs = reinterpret_cast<int*>(smem + S::kCosts);
  int* const totals = reinterpret_cast<int*>(smem + S::kTotals);
  if (threadIdx.x < 2) totals[threadIdx.x] = 0;
  __syncthreads();
  if (p.seqs > kSortedSequences) return;
#pragma unroll 1
  for (int i = threadIdx.x; i < p.seqs; i += S::kThreads) {
    const int4 seq = varlen_sequence(p, i);
    costs[i] = seq.y > 0 ? pair_cost<S, WINDOW>(p, seq) : -1;
    if (seq.y > 0) {
      atomicAdd(totals, cdiv(cdiv(seq.y, S::kRows), 2));
      atomicAdd(totals + 1, 1);
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < p.seqs; i += S::kThreads) {
    const int cost = costs[i];
    int rank = 0;
    for (int o = 0; o < p.seqs; ++o) rank += costs[o] > cost || (costs[o] == cost && o < i);
    order[rank] = varlen_sequence(p, i);
  }
  __syncthreads();
}

// Tile scheduler: the work tiles of this CTA, one after the other. By a whole warp.
template <typename S, bool WINDOW>
struct VarlenScheduler {
  int round = 0, rank = 0, base = 0;  // sequences before `rank` have `base` tiles, or pairs of them
  int4 seq{};
  int head = 0, second = -1;  // second tile of a pair, < 0 if there is none
  bool paired;

  __device__ __forceinline__ VarlenScheduler(const VarlenParams& p, const uint8_t* smem) {
    const int* totals = reinterpret_cast<const int*>(smem + S::kTotals);
    const int64_t pairs = int64_t(totals[0]) * p.heads, ctas = gridDim.x;
    paired = p.seqs > kSortedSequences || (pairs >= ctas && (totals[1] > 1 || pairs >= 3 * ctas));
  }

  __device__ __forceinline__ VarlenTile work_tile(const VarlenParams& p, int tile) const {
    const int begin = tile * S::kRows, rows = min(S::kRows, seq.y - begin);
    const int position = seq.w - seq.y + begin;
    int end = position + rows, first = 0;
    if constexpr (WINDOW) {
      end = p.right < 0 ? seq.w : min(seq.w, end + p.right);
      first = p.left < 0 ? 0 : max(0, position - p.left) / S::kKeys;
    }
    return {seq.x + begin, rows, position, seq.z, max(0, end), head, first};
  }

  __device__ __forceinline__ VarlenTile next(const VarlenParams& p, const uint8_t* smem) {
    if (second >= 0) {
      const int tile = second;
      second = -1;
      return work_tile(p, tile);
    }
    const int4* order = reinterpret_cast<const int4*>(smem + S::kOrder);
    const int lane = threadIdx.x & 31, ctas = gridDim.x, cta = blockIdx.x;
    const int item = round * ctas + (round & 1 ? ctas - 1 - cta : cta);
    ++round;
    while (rank < p.seqs) {
      const int at = rank + lane;
      int4 mine = make_int4(0, 0, 0, 0);
      if (at < p.seqs) mine = p.seqs > kSortedSequences ? varlen_sequence(p, at) : order[at];
      const int tiles = cdiv(mine.y, S::kRows), count = (paired ? (tiles + 1) / 2 : tiles) * p.heads;
      int sum = count;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += other;
      }
      const unsigned past = __ballot_sync(0xffffffffu, item < base + sum);
      if (past == 0) {
        base += __shfl_sync(0xffffffffu, sum, 31), rank += 32;
        continue;
      }
      const int from = __ffs(past) - 1;
      base += __shfl_sync(0xffffffffu, sum - count, from), rank += from;
      seq.x = __shfl_sync(0xffffffffu, mine.x, from), seq.y = __shfl_sync(0xffffffffu, mine.y, from);
      seq.z = __shfl_sync(0xffffffffu, mine.z, from), seq.w = __shfl_sync(0xffffffffu, mine.w, from);
      const int last = cdiv(seq.y, S::kRows) - 1, within = item - base;
      if (paired) {
        const int of_head = last / 2 + 1;
        head = within / of_head;
        const int early = within - head * of_head;
        second = 2 * early < last ? early : -1;
        return work_tile(p, last - early);
      }
      // With the head as the fastest index, tiles with most keys come first; with the tile as the fastest index,
      // neighbours share keys and values, which matters more where contexts are long.
      if (seq.w >= 2 * seq.y) {
        head = within / (last + 1);
        return work_tile(p, last - (within - head * (last + 1)));
      }
      const int early = within / p.heads;
      head = within - early * p.heads;
      return work_tile(p, last - early);
    }
    return {0, 0, 0, 0, 0, 0, 0};
  }
};

// Tiles of keys that a work tile sees.
template <typename S>
__device__ __forceinline__ int tiles_of(const VarlenTile& work) {
  return cdiv(work.end, S::kKeys) - work.first;
}

// Producer: loads Q, keys and values of all work tiles by TMA. By one warp.
template <typename S, int DK, int DV, bool WINDOW>
__device__ __forceinline__ void copy_varlen(const VarlenParams& p, const CUtensorMap& q_map,
                                            const CUtensorMap& k_map, const CUtensorMap& v_map, uint8_t* smem,
                                            uint32_t base) {
  const FlashBars<S> bars{base + S::kBars};
  VarlenScheduler<S, WINDOW> scheduler(p, smem);
  int tile = 0;
#pragma unroll 1
  for (uint32_t q_parity = 1;; q_parity ^= 1) {
    const VarlenTile work = scheduler.next(p, smem);
    const int count = tiles_of<S>(work), top = work.first + count - 1, kv_head = work.head / p.group;
    if ((threadIdx.x & 31) == 0) {
#pragma unroll 1
      for (int i = 0; i <= count; ++i) {
        if (i < count) {
          const int t = tile + i, key = work.key + (top - i) * S::kKeys;
          mbar_wait(bars.k_empty(t), bars.parity(t) ^ 1);
          mbar_arrive_expect_tx(bars.k_full(t), S::kKeyTile);
#pragma unroll
          for (int h = 0; h < DK / 64; ++h)
            tma_load(base + S::kK + t % S::kStages * S::kKeyTile + h * (S::kKeys * 128), &k_map, h * 64,
                     kv_head, key, bars.k_full(t));
        }
        if (i == 0) {
          mbar_wait(bars.q_empty(), q_parity);
          int4* const to = reinterpret_cast<int4*>(smem + S::kWork);
          to[0] = make_int4(work.token, work.rows, work.position, work.key);
          to[1] = make_int4(work.end, work.head, WINDOW ? work.first : 0, 0);
          if (work.rows == 0) {
            mbar_arrive(bars.q_full());
          } else {
            mbar_arrive_expect_tx(bars.q_full(), S::kQ);
#pragma unroll
            for (int h = 0; h < DK / 64; ++h)
              tma_load(base + h * (S::kRows * 128), &q_map, h * 64, work.head, work.token, bars.q_full());
          }
        } else {
          const int t = tile + i - 1, key = work.key + (top - i + 1) * S::kKeys;
          mbar_wait(bars.v_empty(t), bars.parity(t) ^ 1);
          mbar_arrive_expect_tx(bars.v_full(t), S::kValueTile);
#pragma unroll
          for (int h = 0; h < DV / 64; ++h)
            tma_load(base + S::kV + t % S::kStages * S::kValueTile + h * (S::kKeys * 128), &v_map, h * 64,
                     kv_head, key, bars.v_full(t));
        }
      }
    }
    __syncwarp();
    tile += count;
    if (work.rows == 0) break;
  }
}

// Normalizes the rows and writes them, and their log-sum-exp. row0: of this thread, in the work tile.
template <typename T, int DV>
__device__ __forceinline__ void write_varlen(const VarlenParams& p, const VarlenTile& work,
                                             const Accumulators<DV>& acc, int row0) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = row0 + r * 8;
    const int64_t token = work.token + row;
    const RowEpilogue epilogue(acc.m[r], acc.l[r], p.scale_log2);
    const float by = epilogue.inverse();
    const bool real = row < work.rows;
    if (real && p.lse != nullptr && (lane & 3) == 0) p.lse[token * p.heads + work.head] = epilogue.lse();
    T* const to = static_cast<T*>(p.out) + token * p.out_token + work.head * p.out_head;
    store_row(to, acc.o, r, by, real, p.v_dim);
  }
}

// Traits of flash_attention.
template <typename T, int DK, int DV, bool WINDOW>
struct Varlen {
  using Type = T;
  using Params = VarlenParams;
  using Cap = SoftCap<false>;
  using Shape = VarlenShape<DK, DV>;
  static constexpr bool kFence = false, kWindow = WINDOW, kTwoSided = WINDOW, kPairs = true;
  static constexpr bool kTurns = true, kReloads = false;
  static constexpr int kFills = 1, kMaps = 3, kProducerRegisters = 40, kConsumerRegisters = 232;

  struct Work : VarlenTile {
    int count;
  };

  static __device__ __forceinline__ void begin(uint8_t*) {}
  static __device__ __forceinline__ void prepare(const Params& p, uint8_t* smem) {
    sort_varlen<Shape, WINDOW>(p, smem);
  }

  static __device__ __forceinline__ void produce(const Params& p, const CUtensorMap& q_map,
                                                 const CUtensorMap& k_map, const CUtensorMap& v_map,
                                                 uint8_t* smem, uint32_t base, int warp) {
    if (warp == 0) copy_varlen<Shape, DK, DV, WINDOW>(p, q_map, k_map, v_map, smem, base);
  }

  static __device__ __forceinline__ Work get_work(const uint8_t* smem, uint32_t) {
    const int4 a = reinterpret_cast<const int4*>(smem + Shape::kWork)[0];
    const int2 b = reinterpret_cast<const int2*>(smem + Shape::kWork)[2];
    VarlenTile tile{a.x, a.y, a.z, a.w, b.x, b.y, 0};
    if constexpr (WINDOW) tile.first = reinterpret_cast<const int*>(smem + Shape::kWork)[6];
    return {tile, tiles_of<Shape>(tile)};
  }
  static __device__ __forceinline__ bool shares(const Params&, const Work&) { return false; }
  static __device__ __forceinline__ int seen(const Params& p, const Work& work, int row) {
    const int after = WINDOW ? p.right : 0;
    return after < 0 ? work.end : work.position + row + 1 + after;
  }
  static __device__ __forceinline__ int seen_whole(const Params& p, const Work& work, int group) {
    const int whole = seen(p, work, group * 64);
    return max(0, WINDOW ? min(whole, work.end) : whole) / Shape::kKeys;
  }
  static __device__ __forceinline__ int first_seen(const Params& p, const Work& work, int row) {
    return p.left < 0 ? 0 : work.position + row - p.left;
  }
  static __device__ __forceinline__ int seen_from(const Params& p, const Work& work) {
    return cdiv(max(0, first_seen(p, work, work.rows - 1)), Shape::kKeys);
  }
  static __device__ __forceinline__ bool ends_within(const Params&, const Work& work) {
    return work.end % Shape::kKeys != 0;
  }
  static __device__ __forceinline__ int unused(const Params&, const Work& work) {
    return Shape::kKeys - work.end % Shape::kKeys;
  }

  struct Scores {
    static constexpr bool kBounded = false;
    UniformScale scale_log2;
    __device__ __forceinline__ Scores(const Params& p, const Cap&, uint8_t*, const Work&, int, int, bool, int)
        : scale_log2{p.scale_log2} {}
    static __device__ __forceinline__ bool in_pairs(const Cap&) { return true; }
    template <bool PAIRS, typename... Args>
    __device__ __forceinline__ void adjust(const Args&...) const {}
    template <typename... Args>
    __device__ __forceinline__ void adjust_sums(const Args&...) const {}
    __device__ __forceinline__ void finish(const Params&, const Work&, Accumulators<DV>&) const {}
  };

  static __device__ __forceinline__ void finish(const Params& p, const Work& work,
                                                const Accumulators<DV>& acc, uint8_t*, uint32_t, int group,
                                                int warp, bool) {
    write_varlen<T, DV>(p, work, acc, group * 64 + warp * 16 + (threadIdx.x >> 2 & 7));
  }
};

template <typename T, int DK, int DV, bool WINDOW>
__device__ __forceinline__ void varlen_attention(const VarlenParams& p, const CUtensorMap& q_map,
                                                 const CUtensorMap& k_map, const CUtensorMap& v_map) {
  flash_attention<Varlen<T, DK, DV, WINDOW>>(p, q_map, k_map, v_map, {});
}

}  // namespace gm
#endif
