// The same product for many tokens, whose two warpgroups keep half a slot apart, and whose CTAs may come in pairs.
//
// A warpgroup multiplies a slot with 64 of its rows, waits, and adds the products to its float32 sums while the tensor
// cores work for the other one. They are busy all the time as long as the two are further apart than an addition takes.
// Nothing but a beginning is needed for that: the second warpgroup begins a slot when the first has its first products
// of it (the middle barrier of the slot), which holds it back only where both have waited for a copy. An order of turns
// would put the latency of a barrier between any two groups of products.
//
// PAIRS: two CTAs of a cluster have neighbouring columns of y and the same rows of x. Each copies half of these rows into
// the rings of both (multicast), so that 256 x 128 tiles take 32 KB a slot from L2 and not 48. A slot is filled again
// when the warps of both CTAs have left it.
//
// WHOLE: a tile of y is staged whole, and stored by TMA while the next one is multiplied. All CTAs end their tiles at
// about the same time, and memory takes longer for what they store than the warps could wait with few products to a tile.
//
// AHEAD: the second warpgroup waits in the first slot of a tile only, until half of the first one's first products have
// run: its own are queued by the time that the others end, and tensor cores do not wait for a barrier in every slot. And
// W of a CTA's next tile is fetched into L2 while it multiplies this one. Rings of three slots of 48 KB bridge the latency
// of L2, but not that of memory behind what all CTAs store at the end of a tile. A large y does not stay in L2.
#pragma once
#include "turns.cuh"

#ifdef __CUDACC__

namespace gm::w8a8 {

constexpr int64_t kPassing = 16 << 20;  // elements of a y that L2 should not keep: 32 MB of 50

template <class S, bool PAIRS, bool WHOLE, bool AHEAD>
struct Staggered : S {
  static constexpr bool kWhole = WHOLE, kAhead = AHEAD;
  static constexpr int kCtas = PAIRS ? 2 : 1;
  static constexpr int kTable = WHOLE ? S::kTokens * S::kColumns * 2 : S::kTable;
  // A whole tile lies in the swizzle of TMA, a pattern of 1024 bytes.
  static constexpr int kEndScales = S::kTokenScales + S::kFeatures * 8;
  static constexpr int kEpilogue = kTable + (WHOLE ? (kEndScales + 1023) / 1024 * 1024 : kEndScales);
  static constexpr int kShare = S::kA / kCtas, kShareRows = S::kRows / kCtas;  // of x, that a CTA copies
};

template <class S>
__device__ __forceinline__ Tile tile_of_rank(const Params& p, int index, int rank) {
  const Tile tile = tile_at<S>(p, index);  // p.n_tiles counts pairs
  return {tile.n * S::kCtas + rank * S::kTileN, tile.m};
}

// As produce(), of all blocks of k, with this CTA's share of x.
template <class S>
__device__ __forceinline__ void produce_shares(const Params& p, const void* w_map, const void* x_map,
                                               uint32_t base, int first_tile, int step, int rank) {
  Ring<S> ring(base, p.slots);
  const uint64_t policy = l2_evict_normal();
  const auto scale_bytes = [&](const Tile& tile) { return min(S::kTileM, p.x_pitch - tile.m) * 4; };
  const auto load_w = [&](const Ring<S>& r, const Tile& tile, int k) {
    mbar_arrive_expect_tx(r.full, S::kA + S::kB + (S::kBlocks ? scale_bytes(tile) : 0));
    tma_load(r.b, w_map, k * kBlockK, tile.n, r.full);
  };
  const auto load_x = [&](const Ring<S>& r, const Tile& tile, int k) {
    if constexpr (S::kBlocks)
      bulk_load(r.scales, p.x_scale + static_cast<int64_t>(k) * p.x_pitch + tile.m, scale_bytes(tile), r.full,
                policy);
    const int row = tile.m + rank * S::kShareRows;
    if constexpr (S::kCtas > 1)
      tma_load_to_all<S::kCtas>(r.a + rank * S::kShare, x_map, k * kBlockK, row, r.full);
    else
      tma_load(r.a, x_map, k * kBlockK, row, r.full);
  };
  const int all = p.n_tiles * p.m_tiles;
  const int ahead = first_tile < all ? min(p.slots, p.k_blocks) : 0;
  if (ahead > 0) {
    const Tile tile = tile_of_rank<S>(p, first_tile, rank);
    Ring<S> w_ring = ring;
#pragma unroll 1
    for (int i = 0; i < ahead; ++i, w_ring.next()) load_w(w_ring, tile, i);
    griddepcontrol_wait();
#pragma unroll 1
    for (int i = 0; i < ahead; ++i, ring.next()) load_x(ring, tile, i);
  }
  int k = ahead;
#pragma unroll 1
  for (int index = first_tile; index < all; index += step, k = 0) {
    const Tile tile = tile_of_rank<S>(p, index, rank);
    // One of the CTAs whose next tiles have the same rows of W fetches them.
    [[maybe_unused]] int next_n = 0;
    [[maybe_unused]] bool fetches = false;
    if constexpr (S::kAhead) {
      const Tile next = tile_of_rank<S>(p, min(index + step, all - 1), rank);
      next_n = next.n, fetches = index + step < all && next.m / S::kTileM % p.band == 0;
    }
#pragma unroll 1
    for (; k < p.k_blocks; ++k) {
      mbar_wait(ring.empty(), ring.parity ^ 1);
      load_w(ring, tile, k);
      load_x(ring, tile, k);
      if constexpr (S::kAhead)
        if (fetches) tma_prefetch(w_map, k * kBlockK, next_n);
      ring.next();
    }
  }
}

// Main loop of a tile with two blocks of 64 rows for each warpgroup. SAME: the rows of W of the tile share a block row.
// rows: the warpgroup's first row of x in the tile; my_row: the thread's, of 64. n: first row of W.
template <typename T, class S, bool SAME, typename Release>
__device__ __forceinline__ void multiply_staggered(const Params& p, float (&sums)[2][S::kSums], Ring<S>& ring,
                                                   TileScales<S>& scales, int warpgroup, int my_row, int n,
                                                   const Release& release) {
  const int rows = warpgroup * 128;
  const uint32_t first_a = described(ring.base + rows * kBlockK),
                 first_b = described(ring.base + ring.slots * S::kA);
  float part[S::kSums];
#pragma unroll 1
  for (int k = 0; k < p.k_blocks; ++k) {
    [[maybe_unused]] float x[2][2], w = 1.f;
    if constexpr (S::kBlocks && SAME) w = scales.at(p, k, 0);
    const uint32_t parity = ring.parity, from = ring.scales + (rows + my_row) * 4;
    const uint32_t a = first_a + ring.index * (S::kA / 16), b = first_b + ring.index * (S::kB / 16);
    const uint32_t empty = ring.empty(), middle = ring.middle();
    mbar_wait(ring.full, parity);
    ring.next();
    if constexpr (S::kBlocks) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i / 2][i % 2] = ld_shared<float>(from + i / 2 * 256 + i % 2 * 32);
    }
    if (warpgroup == 1 && (!S::kAhead || k == 0)) mbar_wait(middle, parity);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const auto let_begin = [&] {
        if (warpgroup == 0 && (threadIdx.x & 31) == 0) mbar_arrive(middle);
      };
      if (S::kAhead && h == 0) {
        multiply_described<T, S, 0, 2>(part, a, b, 0);
        multiply_described<T, S, 2, 4>(part, a, b, 1);
        wgmma_wait<1>();
        let_begin();
      } else {
        multiply_described<T, S>(part, a + h * (64 * kBlockK / 16), b, 0);
      }
      wgmma_wait<0>();
      if (h == 1)
        release(empty);
      else if (!S::kAhead)
        let_begin();
      wgmma_fence_operand(part);
      if constexpr (!S::kBlocks) {
#pragma unroll
        for (int i = 0; i < S::kSums; ++i) sums[h][i] += part[i];
      } else if constexpr (SAME) {
        const float low = x[h][0] * w, high = x[h][1] * w;
#pragma unroll
        for (int i = 0; i < S::kSums; ++i) sums[h][i] += part[i] * (i & 2 ? high : low);
      } else {
        int column = n + (threadIdx.x & 3) * 2;
        asm volatile("" : "+r"(column));  // addresses of scales are not kept from block to block
#pragma unroll
        for (int i = 0; i < S::kSums; i += 4) {
          const int row = column + i * 2;
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const float c = scales.of_row(p, row + j, k);
            sums[h][i + j] += part[i + j] * (x[h][0] * c),
                sums[h][i + 2 + j] += part[i + 2 + j] * (x[h][1] * c);
          }
#pragma unroll
          for (int j = i; j < i + 4; ++j) asm volatile("" : "+f"(sums[h][j]));  // no load of scales earlier
        }
      }
      wgmma_fence_operand(sums[h]);  // before the next products overwrite part
    }
  }
}

template <typename T, class S>
__device__ __forceinline__ void product_staggered(const Params& p, const CUtensorMap& w_map,
                                                  const CUtensorMap& x_map, const CUtensorMap& y_map) {
  static_assert(S::kPlain && S::kWarpgroups == 2 && (S::kHalves == 1 || S::kReallocates));
  using Sum = typename T::Sum;
  constexpr int kSums = S::kSums;
  extern __shared__ __align__(1024) uint8_t smem[];
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  const uint32_t base = smem_u32(smem);
  init_ring<S>(base, p.slots, S::kCtas * S::kWarpgroups * 4, 4);
  if constexpr (S::kCtas > 1)
    cluster_sync();
  else
    __syncthreads();
  griddepcontrol_launch_dependents();
  const int rank = S::kCtas > 1 ? cluster_rank() : 0;
  const int all = p.n_tiles * p.m_tiles, first = blockIdx.x / S::kCtas, step = gridDim.x / S::kCtas;

  if (warp >= S::kWarpgroups * 4) {
    if constexpr (S::kReallocates) setmaxnreg_dec<40>();
    if (threadIdx.x == S::kMathThreads) produce_shares<S>(p, &w_map, &x_map, base, first, step, rank);
    __syncwarp();
  } else {
    if constexpr (S::kReallocates) setmaxnreg_inc<232>();
    const int warpgroup = warp >> 2, rows = warpgroup * 64 * S::kHalves, my_rows = (warp & 3) * 16;
    const uint32_t epilogue_at = S::rings(p.slots) + warpgroup * S::kEpilogue, table = base + epilogue_at;
    Ring<S> ring(base, p.slots);
    constexpr bool kOneSet = S::kHalves == 2;  // one set of products in flight, of either half of the rows
    std::conditional_t<kOneSet, TileScales<S>, BlockScales<S>[1]> scales;
    const auto load_scales = [&](int index) {
      const int n = tile_of_rank<S>(p, min(index, all - 1), rank).n;
      if constexpr (!S::kBlocks)
        return;
      else if constexpr (kOneSet)
        scales.load(p, n);
      else
        scales[0].load(p, n, 0);
    };
    load_scales(first);
    griddepcontrol_wait();
    const auto release = [&](uint32_t empty) {
      __syncwarp();
      if constexpr (S::kCtas > 1) {
        if (lane < S::kCtas) mbar_arrive_at_rank(empty, lane);
      } else {
        if (lane == 0) mbar_arrive(empty);
      }
    };
    const auto multiply = [&](Sum(&d)[kSums], const Ring<S>& r, int h, int add) {
      multiply_slot<T, S>(d, r, rows + h * 64, add);
    };
    [[maybe_unused]] const uint64_t y_policy =
        static_cast<int64_t>(p.m) * p.n < kPassing ? l2_evict_normal() : l2_evict_first();
#pragma unroll 1
    for (int index = first; index < all; index += step) {
      const Tile tile = tile_of_rank<S>(p, index, rank);
      const EpilogueOperands<S, Sum> operands(p, tile.n, tile.m + rows);
      if constexpr (S::kBlocks) {
        if constexpr (kOneSet)
          scales.begin(p, tile.n);
        else
          scales[0].begin(p, 0);
        load_scales(index + step);
      }
      Sum sums[S::kHalves][kSums] = {};
      if constexpr (kIntegers<Sum>) {
        multiply_integers(p, sums, ring, multiply, release);
      } else if constexpr (S::kHalves == 2) {
        const int my_row = my_rows + (lane >> 2);
        if (S::kBlocks && scales.same)
          multiply_staggered<T, S, true>(p, sums, ring, scales, warpgroup, my_row, tile.n, release);
        else
          multiply_staggered<T, S, false>(p, sums, ring, scales, warpgroup, my_row, tile.n, release);
      } else {
        float parts[2][kSums];
        Factors<S> factors[2];
        multiply_blocks<T, S>(
            p, sums, ring, scales, rows, my_rows, 0, p.k_blocks, [&](int) { return tile.n; }, parts, factors,
            multiply, release);
      }
      if (S::kWhole && lane == 0) tma_store_wait_read();
      __syncwarp();
      bar_sync(warpgroup + 1, 128);  // the table of the last tile has been read
      operands.store(table, warpgroup);
#pragma unroll
      for (int h = 0; h < S::kHalves; ++h) {
        const int m0 = tile.m + rows;
        if (S::kWhole && p.vector) {
          const auto part = [&](int column) {
            return table + ((h * 2 + column / 64) * 4 + (warp & 3)) * kPart;
          };
          stage_rows<S>(p, sums[h], smem + epilogue_at, tile.n, m0, h, part, [&](int column) {
            fence_proxy_async();
            __syncwarp();
            if (lane == 0) {
              if constexpr (S::kAhead)
                tma_store(&y_map, part(column), tile.n + column, m0 + h * 64 + my_rows, y_policy);
              else
                tma_store(&y_map, part(column), tile.n + column, m0 + h * 64 + my_rows);
            }
          });
        } else {
          store_rows<S>(p, sums[h], table, smem + epilogue_at, tile.n, m0, h);
        }
      }
      if (S::kWhole && lane == 0) tma_store_commit();
      __syncwarp();
    }
    if (S::kWhole && lane == 0) tma_store_wait_read();
    __syncwarp();
  }
  // A CTA may leave once the other neither copies into its rings nor arrives at its barriers.
  if constexpr (S::kCtas > 1) cluster_sync();
}

}  // namespace gm::w8a8
#endif
