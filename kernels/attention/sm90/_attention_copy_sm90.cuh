// Producer warps of attention on Hopper: Q, and pages of keys and values, into shared memory.
#pragma once
#include "_attention_work_sm90.cuh"
#include "_flash_sm90.cuh"
#include "sm90/tma.cuh"

#ifdef __CUDACC__
namespace gm {

// Loads Q of a work tile and publishes the tile to the consumer warpgroups. By one thread.
template <class S>
__device__ __forceinline__ void load_q(const AttentionParams& p, const CUtensorMap& q_map, uint8_t* smem,
                                       uint32_t base, const FlashBars<S>& bars, const Work& work,
                                       int round = 0) {
  constexpr int D = S::kQueryDim;
  put_work(smem + S::kWork + (round & 1) * S::kNextWork, work);
  if (work.rows == 0) {
    mbar_arrive(bars.q_full());
    return;
  }
  mbar_arrive_expect_tx(bars.q_full(), p.tile_q * p.group * D * 2);
#pragma unroll
  for (int h = 0; h < D / 64; ++h)
    tma_load(base + h * (S::kRows * 128), &q_map, h * 64, work.head * p.group, work.token, bars.q_full());
}

// Loads pages as TMA boxes, one per lane. By S::kCopying warps: half of them load keys, the others values, in
// columns of 64 elements; the first one also loads Q, and is the scheduler warp.
template <class S>
__device__ __forceinline__ void produce_boxes(const AttentionParams& p, const CUtensorMap& q_map,
                                              const CUtensorMap& k_map, const CUtensorMap& v_map,
                                              uint8_t* smem, uint32_t base, int warp) {
  constexpr int D = S::kQueryDim;
  const FlashBars<S> bars{base + S::kBars};
  constexpr int kWarps = S::kCopying / 2;
  const int lane = threadIdx.x & 31, first = warp % kWarps;
  const bool values = warp >= kWarps, copies = lane < 1 << p.log_boxes;
  const CUtensorMap* map = values ? &v_map : &k_map;
  const uint32_t slots = base + (values ? S::kV : S::kK) + lane * p.box * 128;
  const uint32_t fulls = values ? bars.v_full(0) : bars.k_full(0),
                 empties = values ? bars.v_empty(0) : bars.k_empty(0);
  TileScheduler<S> scheduler(p, smem, warp == 0);
  int tile = 0;
  Work work{};
  for (int round = 0;; ++round) {
    uint8_t* const place = smem + S::kWork + 48 + (round & 1) * 48;
    if (warp == 0) {
      scheduler.next(p, smem, work);
      mbar_wait(bars.work_empty(round), (round >> 1 & 1) ^ 1);
      __syncwarp();  // a lane that came later would wait for the phase that the first one begins
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
    // The page that this lane loads of tile n; p.blocks, for which TMA fills zeros, if none of its keys is visible.
    int slot, next_slot = 0;
    const auto page_of = [&](int n) {
      const int key = n * S::kKeys + lane * p.box, page = quotient(key, p.page, p.by_page);
      next_slot = key - page * p.page;
      return copies && key < work.end && key + p.box > low ? row[page] : p.blocks;
    };
    int n = work.first + work.count - 1, next_page = work.count > 0 ? page_of(n) : 0;
    // The first Q needs no place to become free, and is on its way before the first page is known.
    if (warp == 0 && lane == 0 && round == 0) load_q<S>(p, q_map, smem, base, bars, work);
#pragma unroll 1
    for (int i = 0; i < work.count || i == 0; ++i, ++tile) {
      if (warp == 0 && i + 1 >= work.count) scheduler.fetch_after(p, work);
      if (work.count > 0) {
        const int page = next_page;
        slot = next_slot;
        if (i + 1 < work.count) next_page = page_of(--n);
        const uint32_t at = tile % S::kStages, full = fulls + at * 8;
        mbar_wait(empties + at * 8, FlashBars<S>::parity(tile) ^ 1);
        if (first == 0 && lane == 0)
          mbar_arrive_expect_tx(full, S::kTile);  // of all columns; other warps' copies may complete before
        __syncwarp();
        if (copies) {
#pragma unroll
          for (int c = 0; c < D / 64; c += kWarps)
            tma_load(slots + at * S::kTile + (c + first) * (S::kKeys * 128), map, (c + first) * 64, slot,
                     work.head, page, full);
        }
        __syncwarp();
      }
      if (warp == 0 && i == 0 && round > 0) {
        mbar_wait(bars.q_empty(), (round & 1) ^ 1);
        if (lane == 0) load_q<S>(p, q_map, smem, base, bars, work, round);
        __syncwarp();
      }
      if (work.count == 0) break;
    }
    if (work.rows == 0) break;
  }
}

}  // namespace gm
#endif
