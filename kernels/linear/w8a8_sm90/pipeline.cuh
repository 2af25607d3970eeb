// Pipeline of 8-bit products: tile scheduler, layout of the ring, and its producer.
#pragma once
#include "params.h"
#include "sm90/tma.cuh"

#ifdef __CUDACC__
#include <cuda.h>

namespace gm::w8a8 {

// A CTA multiplies kRows rows of operand A, 64 * HALVES for each of its WARPGROUPS, by COLUMNS rows of operand B. A is W
// and B is x, for few tokens; or A is x and B is W (PLAIN), so that a thread's accumulators belong to two tokens.
// BLOCKS: scales of 128 x 128 weights and of 128 values of a token.
template <int WARPGROUPS, int HALVES, int COLUMNS, bool PLAIN, bool BLOCKS>
struct Shape {
  static constexpr int kWarpgroups = WARPGROUPS, kHalves = HALVES, kColumns = COLUMNS;
  static constexpr bool kPlain = PLAIN, kBlocks = BLOCKS;
  static constexpr int kRows = 64 * WARPGROUPS * HALVES, kMathThreads = 128 * WARPGROUPS, kSums = COLUMNS / 2;
  // Whether a tile's columns may be in two blocks of W, although those of all begin at multiples of 128.
  static constexpr bool kStraddles = PLAIN && BLOCKS && 128 % COLUMNS != 0;
  static constexpr int kTileM = PLAIN ? kRows : COLUMNS, kTileN = PLAIN ? COLUMNS : kRows;
  // Of a warpgroup.
  static constexpr int kTokens = PLAIN ? 64 * HALVES : COLUMNS, kFeatures = PLAIN ? COLUMNS : 64 * HALVES;
  // Whether the producer is a whole warpgroup, for setmaxnreg: 168 registers for each of 384 threads become 232 and 40.
  static constexpr bool kReallocates = COLUMNS >= 96;
  static constexpr int kA = kRows * kBlockK, kB = COLUMNS * kBlockK, kScales = BLOCKS ? kTileM * 4 : 0;
  // Columns that a warp stages at a time, PLAIN.
  static constexpr int kStaged = COLUMNS % 64 == 0 ? 64 : 32;
  // Epilogue of a warpgroup: staging of up to 64 tokens and 64 columns of y, and their scales.
  static constexpr int kChunk = kTokens < 64 ? kTokens : 64, kTable = kChunk * 128,
                       kTokenScales = kTokens * 8;
  static constexpr int kEpilogue = kTable + kTokenScales + kFeatures * 8;
  static __device__ __forceinline__ int rings(int slots) { return slots * (kA + kB); }
};

// State of the pipeline: shared memory addresses of the current slot.
template <class S>
struct Ring {
  uint32_t a, b, scales, full;  // of the slot
  uint32_t base, parity = 0;
  int index = 0, slots;
  __device__ __forceinline__ Ring(uint32_t base, int slots) : base(base), slots(slots) { update(); }
  __device__ __forceinline__ void update() {
    const uint32_t after = base + S::rings(slots) + S::kWarpgroups * S::kEpilogue;
    a = base + index * S::kA, b = base + slots * S::kA + index * S::kB;
    scales = after + index * S::kScales;
    full = after + slots * S::kScales + index * 8;
  }
  __device__ __forceinline__ uint32_t empty() const { return full + slots * 8; }
  // A third barrier of the slot, which only staggered products have.
  __device__ __forceinline__ uint32_t middle() const { return full + slots * 16; }
  __device__ __forceinline__ void next() {
    if (++index == slots) index = 0, parity ^= 1;
    update();
  }
};

// Initializes the barriers of a ring, by one thread of the CTA: `leaving` and `halfway` warps arrive at an empty and at a
// middle barrier.
template <class S>
__device__ __forceinline__ void init_ring(uint32_t base, int slots, int leaving, int halfway = 0) {
  if (threadIdx.x == 0) {
    const Ring<S> ring(base, slots);
#pragma unroll 1
    for (int i = 0; i < slots; ++i) {
      mbar_init(ring.full + i * 8, 1);
      mbar_init(ring.empty() + i * 8, leaving);
      if (halfway > 0) mbar_init(ring.middle() + i * 8, halfway);
    }
    fence_mbarrier_init();
  }
}

// First column and row of y of a tile. Rasterization: bands of p.band tiles along m, m first within a band.
struct Tile {
  int n, m;
};

template <class S>
__device__ __forceinline__ Tile tile_at(const Params& p, int index) {
  const int per_band = p.band * p.n_tiles, first = index / per_band * p.band, inside = index % per_band;
  const int high = min(p.band, p.m_tiles - first);
  return {inside / high * S::kTileN, (first + inside % high) * S::kTileM};
}

// Producer of the blocks of k [first, last) of the CTA's tiles, by one thread. W is constant: its copies to the first
// slots are issued before griddepcontrol.wait, those of x after it.
template <class S>
__device__ __forceinline__ void produce(const Params& p, const void* w_map, const void* x_map, uint32_t base,
                                        int first_tile, int step, int first, int last) {
  Ring<S> ring(base, p.slots);
  const uint64_t policy = l2_evict_normal();
  const auto scale_bytes = [&](const Tile& tile) { return min(S::kTileM, p.x_pitch - tile.m) * 4; };
  const auto load_w = [&](const Ring<S>& r, const Tile& tile, int k) {
    mbar_arrive_expect_tx(r.full, S::kA + S::kB + (S::kBlocks ? scale_bytes(tile) : 0));
    tma_load(S::kPlain ? r.b : r.a, w_map, k * kBlockK, tile.n, r.full);
  };
  const auto load_x = [&](const Ring<S>& r, const Tile& tile, int k) {
    tma_load(S::kPlain ? r.a : r.b, x_map, k * kBlockK, tile.m, r.full);
    if constexpr (S::kBlocks)
      bulk_load(r.scales, p.x_scale + static_cast<int64_t>(k) * p.x_pitch + tile.m, scale_bytes(tile), r.full,
                policy);
  };
  const int all = p.n_tiles * p.m_tiles;
  const int ahead = first_tile < all ? min(p.slots, last - first) : 0;
  if (ahead > 0) {
    const Tile tile = tile_at<S>(p, first_tile);
    Ring<S> w_ring = ring;
#pragma unroll 1
    for (int i = 0; i < ahead; ++i, w_ring.next()) load_w(w_ring, tile, first + i);
    griddepcontrol_wait();
#pragma unroll 1
    for (int i = 0; i < ahead; ++i, ring.next()) load_x(ring, tile, first + i);
  }
  int k = first + ahead;
#pragma unroll 1
  for (int index = first_tile; index < all; index += step, k = first) {
    const Tile tile = tile_at<S>(p, index);
#pragma unroll 1
    for (; k < last; ++k) {
      mbar_wait(ring.empty(), ring.parity ^ 1);
      load_w(ring, tile, k);
      load_x(ring, tile, k);
      ring.next();
    }
  }
}

}  // namespace gm::w8a8
#endif
