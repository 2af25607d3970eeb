// Producer warps of attention on Hopper: Q, and pages of keys and values, into shared memory.
#pragma once
#include "_attention_work_sm90.cuh"
#include "_flash_sm90.cuh"
#include "sm90/tma.cuh"

#ifdef __CUDACC__
namespace gm {

template <int D>
using Bars = FlashBars<AttentionShape<D>>;

// Loads Q of a work tile and publishes the tile to the consumer warpgroups. By one thread.
template <int D>
__device__ __forceinline__ void load_q(const AttentionParams& p, const CUtensorMap& q_map, uint8_t* smem,
                                       uint32_t base, const Bars<D>& bars, const Work& work) {
  put_work(smem + AttentionShape<D>::kWork, work);
  if (work.rows == 0) {
    mbar_arrive(bars.q_full());
    return;
  }
  mbar_arrive_expect_tx(bars.q_full(), p.tile_q * p.group * D * 2);
#pragma unroll
  for (int h = 0; h < D / 64; ++h)
    tma_load(base + h * (AttentionShape<D>::kRows * 128), &q_map, h * 64, work.head * p.group, work.token,
             bars.q_full());
}

// Loads pages as TMA boxes, one per lane. By S::kCopying warps: half of them load keys, the others values, in
// columns of 64 elements; the first one also loads Q, and fetches the work for all.
template <int D>
__device__ __forceinline__ void produce_boxes(const AttentionParams& p, const CUtensorMap& q_map,
                                              const CUtensorMap& k_map, const CUtensorMap& v_map,
                                              uint8_t* smem, uint32_t base, int warp) {
  using S = AttentionShape<D>;
  const Bars<D> bars{base + S::kBars};
  constexpr int kWarps = S::kCopying / 2;
  const int lane = threadIdx.x & 31, first = warp % kWarps;
  const bool values = warp >= kWarps, copies = lane < 1 << p.log_boxes;
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
    // The page that this lane loads of a tile of keys; past the last page where none of its keys is seen: TMA
    // fills zeros.
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
        if (first == 0 && lane == 0)
          mbar_arrive_expect_tx(full, S::kTile);  // of all columns; a count below 0 is no harm
        __syncwarp();
        if (copies) {
#pragma unroll
          for (int c = 0; c < D / 64; c += kWarps)
            tma_load(slots + at * S::kTile + (c + first) * (S::kKeys * 128), map, (c + first) * 64, slot,
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

// Copies 32 rows of a tile of keys or values, 16 bytes per lane at a time. id, slot: page and slot of the row
// of this lane, id < 0 for zeros. By one warp, whose rows begin at row0.
template <int D>
__device__ __forceinline__ void copy_rows(int dim, const char* cache, int64_t block, int64_t slot_bytes,
                                          int id, int slot, int row0, uint32_t to) {
  using S = AttentionShape<D>;
  constexpr int kChunks = D / 8, kStep = 32 / kChunks;  // 16-byte chunks of a row; rows at a time
  const int lane = threadIdx.x & 31, chunk = lane % kChunks;
  const char* const from = cache + chunk * 16;
#pragma unroll 4
  for (int i = 0; i < 32; i += kStep) {
    const int of = i + lane / kChunks, row = row0 + of;
    const int page = __shfl_sync(0xffffffffu, id, of), at = __shfl_sync(0xffffffffu, slot, of);
    const bool there = page >= 0 && chunk * 8 < dim;
    cp_async_16(to + (chunk >> 3) * (S::kKeys * 128) + row * 128 + ((chunk ^ row) & 7) * 16,
                there ? from + page * block + at * slot_bytes : cache, there ? 16 : 0);
  }
}

// As produce_boxes, for page sizes that TMA boxes do not fit. By the whole warpgroup, a quarter of a tile per
// warp; the first warp fetches the work.
template <int D>
__device__ __forceinline__ void produce_rows(const AttentionParams& p, const CUtensorMap& q_map,
                                             uint8_t* smem, uint32_t base) {
  using S = AttentionShape<D>;
  const Bars<D> bars{base + S::kBars};
  const int warp = threadIdx.x >> 5 & 3, lane = threadIdx.x & 31;
  Taker<D> taker(p, smem, warp == 0);
  int tile = 0;
  Work work{};
  for (uint32_t q_parity = 1;; q_parity ^= 1) {
    if (warp == 0) {
      taker.take(p, smem, work);
      if (lane == 0) put_work(smem + S::kWork + 48, work);
    }
    bar_sync(kBarCopying, 128);
    work = get_work(smem + S::kWork + 48);
    bar_sync(kBarCopying, 128);
    const int low = p.window > 0 ? work.position - p.window + 1 : 0;
    const char* k = static_cast<const char*>(p.k) + work.head * p.k_head * 2;
    const char* v = static_cast<const char*>(p.v) + work.head * p.v_head * 2;
    const int* row = p.table + work.seq * p.table_row;
    int n = work.first + work.count - 1;
    int slot, next_slot = 0;
    const auto page_of = [&](int of) {
      const int key = of * S::kKeys + warp * 32 + lane, page = quotient(key, p.page, p.by_page);
      next_slot = key - page * p.page;
      return key < work.end && key >= low ? row[page] : -1;
    };
    int id = -1, next_id = work.count > 0 ? page_of(n) : -1;
    slot = 0;
#pragma unroll 1
    for (int i = 0; i <= work.count; ++i) {
      const int old_id = id, old_slot = slot;
      id = next_id, slot = next_slot;
      if (i + 1 < work.count) next_id = page_of(--n);
      if (i < work.count) {
        const int t = tile + i;
        mbar_wait(bars.k_empty(t), Bars<D>::parity(t) ^ 1);
        copy_rows<D>(p.head_dim, k, p.k_block * 2, p.k_slot * 2, id, slot, warp * 32,
                     base + S::kK + (t % S::kStages) * S::kTile);
        cp_async_mbar_arrive(bars.k_full(t));
      }
      if (i == 0) {
        mbar_wait(bars.q_empty(), q_parity);
        if (warp == 0 && lane == 0) load_q<D>(p, q_map, smem, base, bars, work);
        __syncwarp();
      } else {
        const int t = tile + i - 1;
        mbar_wait(bars.v_empty(t), Bars<D>::parity(t) ^ 1);
        copy_rows<D>(p.head_dim, v, p.v_block * 2, p.v_slot * 2, old_id, old_slot, warp * 32,
                     base + S::kV + (t % S::kStages) * S::kTile);
        cp_async_mbar_arrive(bars.v_full(t));
      }
    }
    tile += work.count;
    if (work.rows == 0) break;
  }
}

}  // namespace gm
#endif
