// y[p, :] = x[p, :] · W[expert of p]^T of 8-bit values, rows p sorted by expert: the pipeline and main loop of
// linear/w8a8_sm90/product.cuh, over a list of tiles that every CTA builds from the offsets of the experts. A tile has
// rows of one expert. Rows of x past them are multiplied and not stored.
//
// The list is built, and W copied, before griddepcontrol.wait. So the previous kernel must have waited for the one that
// wrote the offsets before it triggered this launch.
#pragma once
#include "linear/w8a8_sm90/product.cuh"
#include "moe/grouped_linear/frag16_sm90/grouped_tiles.cuh"
#include "experts.h"

namespace gm::w8a8 {

struct ExpertParams {
  Params one;              // of an expert: m is the end of its rows in y, w_scale that of expert 0
  gm::GroupedParams list;  // offsets, experts, and tiles along N
  int64_t expert_scales;   // bytes of an expert's scales of W
};

}  // namespace gm::w8a8

#ifdef __CUDACC__

namespace gm::w8a8 {

struct ExpertTile {
  int expert, n, m, end;  // n within the expert's W, rows m .. end of y
};

template <class S>
__device__ __forceinline__ ExpertTile expert_tile(const ExpertParams& g, const GroupedList& list, int index) {
  const GroupedTile tile = grouped_tile<S::kTileM>(g.list, list, index);
  return {tile.expert, tile.block * S::kTileN, tile.row, tile.end};
}

// The parameters of a tile's expert.
__device__ __forceinline__ Params params_of(const ExpertParams& g, const ExpertTile& tile) {
  Params p = g.one;
  p.m = tile.end;
  p.w_scale = static_cast<const uint8_t*>(p.w_scale) + tile.expert * g.expert_scales;
  return p;
}

// Producer of all tiles of the CTA, by a warp, whose lane 0 copies. W of the first slots is copied before
// griddepcontrol.wait, x after it.
template <class S>
__device__ __forceinline__ void produce_experts(const ExpertParams& g, const GroupedList& list,
                                                const void* w_map, const void* x_map, uint32_t base,
                                                int all) {
  const Params& p = g.one;
  const bool leads = (threadIdx.x & 31) == 0;
  Ring<S> ring(base, p.slots);
  const uint64_t policy = l2_evict_normal();
  struct TileSource {
    int w, m, scales, bytes;
  };
  const auto source_of = [&](int index) {
    const ExpertTile tile = expert_tile<S>(g, list, index);
    const int start = list.starts[tile.expert], column = scale_column(start, tile.expert) + tile.m - start;
    return TileSource{tile.expert * p.n + tile.n, tile.m, column, min(S::kTileM, p.x_pitch - column) * 4};
  };
  const auto load_w = [&](const Ring<S>& r, const TileSource& at, int k) {
    mbar_arrive_expect_tx(r.full, S::kA + S::kB + (S::kBlocks ? at.bytes : 0));
    tma_load(S::kPlain ? r.b : r.a, w_map, k * kBlockK, at.w, r.full);
  };
  const auto load_x = [&](const Ring<S>& r, const TileSource& at, int k) {
    tma_load(S::kPlain ? r.a : r.b, x_map, k * kBlockK, at.m, r.full);
    if constexpr (S::kBlocks)
      bulk_load(r.scales, p.x_scale + static_cast<int64_t>(k) * p.x_pitch + at.scales, at.bytes, r.full,
                policy);
  };
  int index = blockIdx.x, k = 0;
  if (index < all) {
    const TileSource at = source_of(index);
    const int ahead = min(p.slots, p.k_blocks);
    if (leads) {
      Ring<S> w_ring = ring;
#pragma unroll 1
      for (int i = 0; i < ahead; ++i, w_ring.next()) load_w(w_ring, at, i);
    }
    griddepcontrol_wait();
#pragma unroll 1
    for (; k < ahead; ++k, ring.next())
      if (leads) load_x(ring, at, k);
  }
#pragma unroll 1
  for (; index < all; index += gridDim.x, k = 0) {
    const TileSource at = source_of(index);
#pragma unroll 1
    for (; k < p.k_blocks; ++k, ring.next()) {
      if (leads) {
        mbar_wait(ring.empty(), ring.parity ^ 1);
        load_w(ring, at, k);
        load_x(ring, at, k);
      }
    }
    __syncwarp();
  }
}

template <typename T, class S>
__device__ __forceinline__ void grouped_product(const ExpertParams& g, const CUtensorMap& w_map,
                                                const CUtensorMap& x_map) {
  using Sum = typename T::Sum;
  static_assert(!kIntegers<Sum>);
  constexpr int kSums = S::kSums;
  extern __shared__ __align__(1024) uint8_t smem[];
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  const uint32_t base = smem_u32(smem);
  const int slots = g.one.slots, k_blocks = g.one.k_blocks;
  int* const lists = reinterpret_cast<int*>(smem + S::rings(slots) + S::kWarpgroups * S::kEpilogue +
                                            slots * (S::kScales + 16));
  const GroupedList list{lists, lists + g.list.experts + 1};
  init_ring<S>(base, slots, S::kWarpgroups * 4);
  list.build<S::kTileM>(g.list);
  griddepcontrol_launch_dependents();
  const int all = list.first[g.list.experts] * g.list.blocks;

  if (warp >= S::kWarpgroups * 4) {
    if constexpr (S::kReallocates) setmaxnreg_dec<40>();
    if (warp == S::kWarpgroups * 4) produce_experts<S>(g, list, &w_map, &x_map, base, all);
    return;
  }
  if constexpr (S::kReallocates) setmaxnreg_inc<232>();
  const int warpgroup = warp >> 2;
  const int rows = warpgroup * 64 * S::kHalves,
            my_rows = (warp & 3) * 16;  // of A: the warpgroup's, the warp's in 64
  const uint32_t epilogue_at = S::rings(slots) + warpgroup * S::kEpilogue, table = base + epilogue_at;
  const uint8_t* shared = smem + epilogue_at;
  Ring<S> ring(base, slots);
  BlockScales<S> scales[S::kPlain ? 1 : S::kHalves];
  constexpr int kScales = sizeof scales / sizeof *scales;
  const auto w_row = [&](const ExpertTile& tile, int h) {
    return tile.n + (S::kPlain ? 0 : rows + h * 64 + my_rows);
  };
  if constexpr (S::kBlocks) {
    if (static_cast<int>(blockIdx.x) < all) {
      const ExpertTile tile = expert_tile<S>(g, list, blockIdx.x);
      const Params p = params_of(g, tile);
#pragma unroll
      for (int h = 0; h < kScales; ++h) scales[h].load(p, w_row(tile, h), 0);
    }
  }
  griddepcontrol_wait();
  const auto release = [&](uint32_t empty) {
    __syncwarp();
    if (lane == 0) mbar_arrive(empty);
  };
#pragma unroll 1
  for (int index = blockIdx.x; index < all; index += gridDim.x) {
    const ExpertTile tile = expert_tile<S>(g, list, index);
    const Params p = params_of(g, tile);
    const int n0 = tile.n + (S::kPlain ? 0 : rows), m0 = tile.m + (S::kPlain ? rows : 0);
    const int first_row[2] = {w_row(tile, 0), w_row(tile, S::kHalves - 1)};
    const EpilogueOperands<S, Sum> operands(p, n0, m0);
    if constexpr (S::kBlocks) {
      const ExpertTile next = expert_tile<S>(g, list, min(index + static_cast<int>(gridDim.x), all - 1));
#pragma unroll
      for (int h = 0; h < kScales; ++h)
        scales[h].begin(p, 0), scales[h].load(params_of(g, next), w_row(next, h), 0);
    }
    Sum sums[S::kHalves][kSums] = {};
    const auto multiply = [&](Sum(&d)[kSums], const Ring<S>& r, int h, int add) {
      multiply_slot<T, S>(d, r, rows + h * 64, add);
    };
    float parts[S::kHalves > 1 ? 1 : 2][kSums];
    Factors<S> all_factors[S::kHalves > 1 ? 1 : 2];
    multiply_blocks<T, S>(
        p, sums, ring, scales, rows, my_rows, 0, k_blocks, [&](int h) { return first_row[h]; }, parts,
        all_factors, multiply, release);
    operands.store(table, warpgroup);
    constexpr int kStoreColumns = S::kColumns < 64 ? S::kColumns : 64;
    // Recomputed if registers are scarce, instead of kept during the main loop.
    const ExpertTile done = S::kPlain ? expert_tile<S>(g, list, index) : tile;
    Params to = g.one;
    to.m = done.end;
#pragma unroll
    for (int h = 0; h < S::kHalves; ++h)
#pragma unroll
      for (int column = 0; column < S::kColumns; column += kStoreColumns)
        store_fragments<S, kStoreColumns / 8>(to, sums[h] + column / 2, table, shared, warpgroup,
                                              done.n + (S::kPlain ? 0 : rows),
                                              done.m + (S::kPlain ? rows : 0), h, column);
  }
}

}  // namespace gm::w8a8
#endif
