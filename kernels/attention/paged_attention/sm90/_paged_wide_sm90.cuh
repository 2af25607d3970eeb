// Causal attention over a paged cache for Hopper with heads of more than 128 elements: any mix of prefill,
// chunks and decodes in one launch.
//
// As _paged_attention_sm90.cuh, with tiles of 64 keys, since two tiles of 128 and their values do not fit in
// shared memory (FlashAttention-3, Shah et al., 2024, takes 80 at this size). A row of sums is in 128
// registers of each of 4 threads. Results are staged in the place of Q.
#pragma once
#include "attention/sm90/_attention_work_sm90.cuh"
#include "attention/sm90/_soft_cap_sm90.cuh"

namespace gm {

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
};

}  // namespace gm

#include "attention/sm90/_attention_copy_sm90.cuh"
#include "attention/sm90/_attention_rows_sm90.cuh"
#include "sm90/wgmma.cuh"

#ifdef __CUDACC__
namespace gm {

// Tile of scores -> weights 2^(scale_log2 (s - m)), in place; factor: what the sums so far are multiplied by.
template <int D>
__device__ __forceinline__ void softmax(float (&s)[32], Rows<D>& rows, float (&factor)[2], float scale_log2) {
  float most[2] = {-INFINITY, -INFINITY};
#pragma unroll
  for (int i = 0; i < 32; ++i) most[i >> 1 & 1] = fmaxf(most[i >> 1 & 1], s[i]);
  float base[2], sum[2] = {0.f, 0.f};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    most[r] = fmaxf(most[r], __shfl_xor_sync(0xffffffffu, most[r], 1));
    most[r] = fmaxf(most[r], __shfl_xor_sync(0xffffffffu, most[r], 2));
    const float m = fmaxf(most[r], rows.m[r]);
    base[r] = m == -INFINITY ? 0.f : __fmul_rn(m, scale_log2);
    factor[r] = most[r] > rows.m[r] ? exp2_approx(__fmul_rn(rows.m[r], scale_log2) - base[r]) : 1.f;
    rows.m[r] = m;
  }
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    s[i] = exp2_approx(fmaf(s[i], scale_log2, -base[i >> 1 & 1]));
    sum[i >> 1 & 1] += s[i];
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) rows.l[r] = fmaf(rows.l[r], factor[r], sum[r]);
}

// Of a warpgroup: scores of 64 rows and a tile of keys.
template <typename T>
__device__ __forceinline__ void start_wide_scores(float (&s)[32], uint64_t q, uint64_t k) {
  using S = AttentionShape<256>;
#pragma unroll
  for (int i = 0; i < 256 / 16; ++i)
    Wgmma<T, S::kKeys>::ss(s, q + (i >> 2) * (S::kRows * 128 >> 4) + (i & 3) * 2,
                           k + (i >> 2) * (S::kKeys * 128 >> 4) + (i & 3) * 2, i > 0);
  wgmma_commit();
}

// Both halves of the elements of 64 rows.
template <typename T>
__device__ __forceinline__ void start_wide_values(float (&o)[128], const uint32_t (&weights)[4][4],
                                                  uint64_t v, int add) {
  using S = AttentionShape<256>;
  float (&low)[64] = *reinterpret_cast<float (*)[64]>(&o[0]);
  float (&high)[64] = *reinterpret_cast<float (*)[64]>(&o[64]);
#pragma unroll
  for (int i = 0; i < S::kKeys / 16; ++i) {
    Wgmma<T, 128>::template rs<kMajorMN>(low, weights[i], v + i * (2048 >> 4), i > 0 ? 1 : add);
    Wgmma<T, 128>::template rs<kMajorMN>(high, weights[i], v + (2 * S::kKeys * 128 >> 4) + i * (2048 >> 4),
                                         i > 0 ? 1 : add);
  }
  wgmma_commit();
}

// Copies pages as boxes, a lane each. By four warps: two copy 64 elements of keys at a time, two of values;
// the very first also copies Q, and takes the work for all.
__device__ __forceinline__ void produce_wide(const AttentionParams& p, const CUtensorMap& q_map,
                                             const CUtensorMap& k_map, const CUtensorMap& v_map,
                                             uint8_t* smem, uint32_t base, int warp) {
  constexpr int D = 256;
  using S = AttentionShape<D>;
  const Bars<D> bars{base + S::kBars};
  const int lane = threadIdx.x & 31, half = warp & 1;
  const bool values = warp >= 2, copies = lane < 1 << p.log_boxes;
  const CUtensorMap* map = values ? &v_map : &k_map;
  const uint32_t slots = base + (values ? S::kV : S::kK) + lane * p.box * 128;
  const uint32_t fulls = values ? bars.v_full(0) : bars.k_full(0),
                 empties = values ? bars.v_empty(0) : bars.k_empty(0);
  Taker<D> taker(p, smem, warp == 0);
  int tile = 0;
  Work work{};
  for (int round = 0;; ++round) {
    uint8_t* const place = smem + S::kWork + 48 + (round & 1) * 48;
    if (warp == 0) {
      taker.take(p, smem, work);
      mbar_wait(bars.work_empty(round), (round >> 1 & 1) ^ 1);
      if (lane == 0) {
        put_work(place, work);
        mbar_arrive(bars.work_full(round));
      }
      __syncwarp();
    } else {
      mbar_wait(bars.work_full(round), round >> 1 & 1);
      work = get_work(place);
      __syncwarp();
      if (lane < kArrivingLanes) mbar_arrive(bars.work_empty(round));
    }
    const int* row = p.table + work.seq * p.table_row;
    const int low = p.window > 0 ? work.position - p.window + 1 : 0;
    // The page that this lane copies of a tile of keys; a number past all pages where no key of it counts.
    int slot, next_slot = 0;
    const auto page_of = [&](int n) {
      const int key = n * S::kKeys + lane * p.box, page = quotient(key, p.page, p.by_page);
      next_slot = key - page * p.page;
      return copies && key < work.end && key + p.box > low ? row[page] : p.blocks;
    };
    int n = work.first + work.count - 1, next_page = work.count > 0 ? page_of(n) : 0;
#pragma unroll 1
    for (int i = 0; i < work.count || i == 0; ++i, ++tile) {
      if (work.count > 0) {
        const int page = next_page;
        slot = next_slot;
        if (i + 1 < work.count) next_page = page_of(--n);
        const uint32_t at = tile % S::kStages, full = fulls + at * 8;
        mbar_wait(empties + at * 8, Bars<D>::parity(tile) ^ 1);
        if (half == 0 && lane == 0)
          mbar_arrive_expect_tx(full, S::kTile);  // for all; a count below 0 is no harm
        __syncwarp();
        if (copies) {
#pragma unroll
          for (int h = 0; h < 4; h += 2)
            tma_load(slots + at * S::kTile + (h + half) * (S::kKeys * 128), map, (h + half) * 64, slot,
                     work.head, page, full);
        }
        __syncwarp();
      }
      if (warp == 0 && i == 0) {
        mbar_wait(bars.q_empty(), (round & 1) ^ 1);
        if (lane == 0) load_q<D>(p, q_map, smem, base, bars, work);
        __syncwarp();
      }
      if (work.count == 0) break;
    }
    if (work.rows == 0) break;
  }
}

// What a warpgroup has summed up, to the output or to the workspace. The piece of work is read again: the
// loop has no registers for it.
template <typename T>
__device__ __forceinline__ void end_wide(const AttentionParams& p, Rows<256>& rows, uint8_t* smem,
                                         uint32_t base, int group, int warp, bool shared) {
  constexpr int D = 256;
  const Work work = get_work(smem + AttentionShape<D>::kWork);
  const int row0 = (shared ? 0 : group * 64) + warp * 16;
  const bool some = row0 < work.rows;
  if (shared)
    join<D>(rows, smem, group, some, p.scale_log2);  // begins with a barrier of both
  else
    bar_sync(kBarBoth, 256);  // both have done with Q
  if (work.parts() > 1 && work.unit >= 0) {
    add_shared<T, D>(p, work, rows, smem, group, warp);
  } else if (some && !(shared && group == 1)) {
    if (work.parts() == 1 || add_in_turn<D>(p, work, rows, warp))
      write_rows<T, D>(p, work, rows, smem, base, row0);
  }
}

// A multiplying warpgroup, 0 or 1. CAP: scores have a soft cap.
template <typename T, bool CAP>
__device__ __forceinline__ void multiply_wide(const AttentionParams& p, const SoftCap<CAP>& cap,
                                              uint8_t* smem, uint32_t base, int group) {
  constexpr int D = 256;
  using S = AttentionShape<D>;
  const Bars<D> bars{base + S::kBars};
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3, tid = threadIdx.x & 127;
  const auto free_slot = [&](uint32_t bar) {
    if (lane < kArrivingLanes) mbar_arrive(bar);
  };
  if (group == 1) bar_arrive(kBarTurn, 256);  // the first one begins
  int tile = 0;
#pragma unroll 1
  for (uint32_t q_parity = 0;; q_parity ^= 1) {
    mbar_wait(bars.q_full(), q_parity);
    const Work work = get_work(smem + S::kWork);
    if (work.rows == 0) break;
    // The warpgroups take turns at tiles of keys, over the same rows.
    const bool shared = work.rows <= p.shared_rows;
    const int row0 = shared ? 0 : group * 64, step = shared ? 2 : 1;
    const uint64_t q = swizzle128_descriptor(warp_uniform(base + row0 * 128));
    const int mine = row0 + warp * 16 + (lane >> 2), none = 1 << 30;
    int limit[2];  // of the keys that the thread's rows see, less its first column
#pragma unroll
    for (int r = 0; r < 2; ++r)
      limit[r] = min(work.position + static_cast<int>((mine + r * 8) * p.by_group >> 16) + 1, work.end) -
                 (lane & 3) * 2;
    const int reach = p.window > 0 ? p.window : none;
    // Tiles seen_from .. seen_to are seen whole by every row.
    const int seen_to = (max(0, work.position) + 1) / S::kKeys,
              seen_from = p.window > 0 ? cdiv(max(0, work.end - p.window), S::kKeys) : 0;
    const int top = work.first + work.count - 1;

    Rows<D> rows;
    rows.m[0] = rows.m[1] = -INFINITY, rows.l[0] = rows.l[1] = 0.f;
    float s[32];
    uint32_t weights[4][4];
    float factor[2];
    // Scores of a tile to weights.
    const auto weigh = [&](int i) {
      if constexpr (CAP) {
#pragma unroll
        for (int j = 0; j < 32; ++j) s[j] = cap(s[j]);
      }
      const int n = top - i;
      if (n >= seen_to || n < seen_from) {
#pragma unroll
        for (int j = 0; j < 32; ++j) {
          const int key = n * S::kKeys + (j >> 2) * 8 + (j & 1), end = limit[j >> 1 & 1];
          s[j] = key < end && key >= end - reach ? s[j] : -INFINITY;
        }
      }
      softmax<D>(s, rows, factor, p.scale_log2);
    };
    const auto round = [&] {
#pragma unroll
      for (int j = 0; j < 16; ++j) weights[j >> 2][j & 3] = packed<T>(s[2 * j], s[2 * j + 1]);
    };
    const auto wait_keys = [&](int i) { mbar_wait(bars.k_full(tile + i), Bars<D>::parity(tile + i)); };
    const auto wait_values = [&](int i) {
      mbar_wait(bars.v_full(tile + i), Bars<D>::parity(tile + i));
      if (i == 0 && work.last_part() && (work.end & (p.box - 1)) != 0) {
        // What follows the last key in its box may be anything, and 0 times that would not be 0.
        const int from = work.end % S::kKeys, rest = p.box - (work.end & (p.box - 1));
        const uint32_t slot = base + S::kV + (tile % S::kStages) * S::kTile + from * 128;
        for (int c = tid; c < rest * (D / 8); c += 128) {
          const int row = c / (D / 8), chunk = c % (D / 8);
          st_shared(slot + (chunk >> 3) * (S::kKeys * 128) + row * 128 + (chunk & 7) * 16,
                    make_uint4(0, 0, 0, 0));
        }
        fence_proxy_async();
        bar_sync(kBarGroup + group, 128);
      }
    };
    const auto keys_at = [&](int i) {
      return swizzle128_descriptor(warp_uniform(base + S::kK + ((tile + i) % S::kStages) * S::kTile));
    };
    const auto values_at = [&](int i) {
      return swizzle128_descriptor(warp_uniform(base + S::kV + ((tile + i) % S::kStages) * S::kTile), 1024,
                                   S::kKeys * 128);
    };
    const auto turn = [&] {
      if (!shared) bar_sync(kBarTurn + group, 256);
    };
    const auto pass = [&] {
      if (!shared) bar_arrive(kBarTurn + (group ^ 1), 256);
    };
    // A tile of the other warpgroup: said to be done with, but not before it is there.
    const auto skip_keys = [&](int i) {
      mbar_wait(bars.k_full(tile + i), Bars<D>::parity(tile + i));
      free_slot(bars.k_empty(tile + i));
    };
    const auto skip_values = [&](int i) {
      mbar_wait(bars.v_full(tile + i), Bars<D>::parity(tile + i));
      free_slot(bars.v_empty(tile + i));
    };

    int i = shared ? group : 0;  // the tile whose scores come next
    if (shared && group == 1 && work.count > 0) skip_keys(0);
    if (i < work.count) {
      wait_keys(i);
      turn();
      wgmma_fence();
      start_wide_scores<T>(s, q, keys_at(i));
      pass();
      wgmma_wait<0>();
      wgmma_fence_operand(s);
      free_slot(bars.k_empty(tile + i));
      weigh(i);
      round();
      int add = 0;
      if (shared && group == 1) skip_values(0);
#pragma unroll 1
      for (i += step; i < work.count; i += step) {
        if (shared) skip_keys(i - 1);
        wait_keys(i);
        turn();
        wgmma_fence();
        start_wide_scores<T>(s, q, keys_at(i));
        wait_values(i - step);
        wgmma_fence_operand(rows.o);
        wgmma_fence();
        start_wide_values<T>(rows.o, weights, values_at(i - step), add);
        pass();
        wgmma_wait<1>();
        wgmma_fence_operand(s);
        free_slot(bars.k_empty(tile + i));
        weigh(i);
        wgmma_fence_operand(s);
        // Never true: ptxas, which would put the wait before the exponentials,
        // moves it across no such branch.
        if (rows.l[0] + rows.l[1] < 0.f) mbar_arrive(bars.q_full());
        wgmma_wait<0>();
        wgmma_fence_operand(rows.o);
        free_slot(bars.v_empty(tile + i - step));
        if (shared) skip_values(i - 1);
        if (__any_sync(0xffffffffu, factor[0] != 1.f || factor[1] != 1.f)) {
#pragma unroll
          for (int j = 0; j < D / 2; ++j) rows.o[j] *= factor[j >> 1 & 1];
        }
        round();
        add = 1;
      }
      if (shared && i - step + 1 < work.count) skip_keys(i - step + 1);
      wait_values(i - step);
      turn();
      wgmma_fence();
      start_wide_values<T>(rows.o, weights, values_at(i - step), add);
      pass();
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        rows.l[r] += __shfl_xor_sync(0xffffffffu, rows.l[r], 1);
        rows.l[r] += __shfl_xor_sync(0xffffffffu, rows.l[r], 2);
      }
      wgmma_wait<0>();
      wgmma_fence_operand(rows.o);
      free_slot(bars.v_empty(tile + i - step));
      if (shared && i - step + 1 < work.count) skip_values(i - step + 1);
    } else {
      if (work.count > 0) skip_values(0);
#pragma unroll
      for (int j = 0; j < D / 2; ++j) rows.o[j] = 0.f;
    }
    tile += work.count;
    end_wide<T>(p, rows, smem, base, group, warp, shared);
    fence_proxy_async();  // Q of the next piece comes where results were
    __syncwarp();
    free_slot(bars.q_empty());
  }
}

template <typename T, bool CAP>
__device__ __forceinline__ void paged_wide(const AttentionParams& p, const CUtensorMap& q_map,
                                           const CUtensorMap& k_map, const CUtensorMap& v_map,
                                           const SoftCap<CAP>& cap) {
  constexpr int D = 256;
  using S = AttentionShape<D>;
  extern __shared__ __align__(1024) uint8_t smem[];
  const uint32_t base = smem_u32_once(smem);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
  if (threadIdx.x == 0) {
    const Bars<D> bars{base + S::kBars};
    mbar_init(bars.q_full(), 1), mbar_init(bars.q_empty(), 8 * kArrivingLanes);
    for (int i = 0; i < 2; ++i)
      mbar_init(bars.work_full(i), 1), mbar_init(bars.work_empty(i), (S::kCopying - 1) * kArrivingLanes);
    for (int i = 0; i < S::kStages; ++i) {
      mbar_init(bars.k_full(i), 1), mbar_init(bars.v_full(i), 1);
      mbar_init(bars.k_empty(i), 8 * kArrivingLanes), mbar_init(bars.v_empty(i), 8 * kArrivingLanes);
    }
    fence_mbarrier_init();
  }
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  sort_sequences<D>(p, smem);  // begins with a barrier of all threads
  if (warp >= 8) {
    setmaxnreg_dec<40>();
    produce_wide(p, q_map, k_map, v_map, smem, base, warp - 8);
    if (threadIdx.x == 256 && atomicAdd(p.counters + 2, 1u) == gridDim.x - 1)
      p.counters[0] = 0, p.counters[1] = 0, p.counters[2] = 0;  // every CTA has asked for the last time
  } else {
    setmaxnreg_inc<232>();
    multiply_wide<T, CAP>(p, cap, smem, base, warp >> 2);
  }
}

}  // namespace gm
#endif
