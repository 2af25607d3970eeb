// y[p, :] = x[p, :] . W[expert of p]^T of 16-bit floats, rows p sorted by expert: warp-specialised, persistent CTAs.
//
// Y^T = W X^T: rows of W are wgmma's M, rows of x its N, both from shared memory.
//  - A tile has rows of one expert, and every CTA makes the list of tiles from the offsets (grouped_tiles.cuh): the host
//    knows nothing of the routing. A tile is multiplied at the narrowest width that holds its rows, one of several that
//    an instance is compiled for. Rows of an expert's last tile past its end are multiplied and not stored.
//  - W [E, N, K] stays as it is. One warp copies it, and x, by TMA to a ring of slots of 64 columns, and runs ahead
//    across tiles. W of a CTA's first slots is copied before the previous kernel has ended.
//  - With silu_mul eight rows of gate and the same eight of up alternate in shared memory, which is a fifth dimension of
//    the tensor map: a thread's sums of rows r and r + 8 of a block are gate and up of one column of y.
//  - Warpgroups share slots, of which each multiplies its own blocks of rows. Where two of them keep a few slots apart
//    (`lag`), one multiplies while the other stores. Both leave a slot before it is filled again, so that they cannot
//    get further apart than the ring is long. A tile for each of them would take a third more from L2 for the same
//    products.
//  - CTAs of a cluster have neighbouring rows of W and the same rows of x, of which each copies every second box to both
//    (multicast): for many tokens, whose products L2 would not keep up with. A slot is filled when both have left it.
//  - Few tokens: warpgroups take turns along K (SLICES); their sums are added in the order of slices. Blocks of fewer
//    than 64 rows (`w_rows`) divide the rows of W among all multiprocessors; what is multiplied besides is not stored.
#pragma once
#include <type_traits>

#include "params.h"
#ifdef __CUDACC__
#include "sm90/store_16.cuh"
#include "sm90/tma.cuh"
#include "sm90/wgmma.cuh"

namespace gm::dense {

constexpr int kFull = 8, kFree = 10;  // named barriers of the exchange between slices, for each group
constexpr int kBegin = 12;  // named barrier of the second warpgroup's beginning; those of stores are 1 ...

// A position in the ring.
template <class S>
struct Place {
  int index = 0;
  uint32_t parity = 0;
  // By at most as many slots as there are, and by the parity of whole rounds.
  __device__ __forceinline__ void advance(int slots, uint32_t rounds = 0) {
    index += slots, parity ^= rounds;
    if (index >= S::kSlots) index -= S::kSlots, parity ^= 1;
  }
  __device__ __forceinline__ uint32_t full(uint32_t base) const { return base + S::kBars + index * 8; }
  __device__ __forceinline__ uint32_t empty(uint32_t base) const { return full(base) + S::kSlots * 8; }
};

// Calls f(integral_constant<int, W>) of the first width W that holds `rows`.
template <int FIRST, int... REST, typename F>
__device__ __forceinline__ void at_width(Widths<FIRST, REST...>, int rows, const F& f) {
  if constexpr (sizeof...(REST) == 0) {
    f(std::integral_constant<int, FIRST>{});
  } else {
    if (rows <= FIRST)
      f(std::integral_constant<int, FIRST>{});
    else
      at_width(Widths<REST...>{}, rows, f);
  }
}

// Copies W and x of all tiles of the CTA, by a warp, whose lane 0 leads.
template <class S>
__device__ __forceinline__ void produce(const Params& p, const GroupedList& list, const CUtensorMap& w_map,
                                        const CUtensorMap& x_map, uint8_t* smem, uint32_t base, int tiles) {
  const bool leads = (threadIdx.x & 31) == 0;
  const int rank = S::kCluster > 1 ? cluster_rank() : 0, step = gridDim.x / S::kCluster;
  const uint32_t w_bytes = S::kWBlocks * p.w_rows * (kStep * 2);
  const int columns = p.gated ? p.w_rows >> 1 : p.w_rows;  // of y, of a block
  struct Source {
    int expert, n, m, boxes;
  };
  const auto source_of = [&](const GroupedTile& tile) {
    const int boxes = min(S::kTokens / S::kBox, (tile.end - tile.row + S::kBox - 1) / S::kBox);
    return Source{tile.expert, (tile.block * S::kCluster + rank) * S::kWBlocks * columns, tile.row, boxes};
  };
  const auto load_w = [&](const Source& at, const Place<S>& place, int k) {
    const uint32_t full = place.full(base), to = base + place.index * S::kWSlot;
    mbar_arrive_expect_tx(full, w_bytes + at.boxes * (S::kBox * kStep * 2));
    if (p.gated) {
#pragma unroll
      for (int b = 0; b < S::kWBlocks; ++b)
        tma_load(to + b * kBlockBytes, &w_map, k * kStep, 0, 0, (at.n + b * columns) >> 3, at.expert, full);
    } else {
#pragma unroll
      for (int b = 0; b < S::kWBlocks; ++b)
        tma_load(to + b * kBlockBytes, &w_map, k * kStep, at.n + b * columns, at.expert, full);
    }
  };
  const auto load_x = [&](const Source& at, const Place<S>& place, int k) {
    const uint32_t full = place.full(base), to = base + S::kXRing + place.index * S::kXSlot;
#pragma unroll 1
    for (int box = rank; box < at.boxes; box += S::kCluster) {
      const uint32_t place_of_box = to + box * (S::kBox * kStep * 2);
      if constexpr (S::kCluster > 1)
        tma_load_to_all<S::kCluster>(place_of_box, &x_map, k * kStep, at.m + box * S::kBox, full);
      else
        tma_load(place_of_box, &x_map, k * kStep, at.m + box * S::kBox, full);
    }
  };
  Place<S> place;
  int count = 0, k = 0;
#pragma unroll 1
  for (int index = blockIdx.x / S::kCluster; index < tiles; index += step, k = 0) {
    const GroupedTile tile = grouped_tile<S::kTokens>(p.list, list, index);
    const Source at = source_of(tile);
    if (leads) {
      // For the others, which see it once the tile's first slot is full. They are at most kSlots tiles behind.
      *reinterpret_cast<int4*>(smem + S::kInfos + count % kTileInfos * 16) =
          make_int4(tile.expert, tile.block * S::kCluster + rank, tile.row, tile.end);
      if (count == 0) {  // the ring is empty, and W is constant
        const int ahead = min(S::kSlots, p.steps);
        Place<S> w_place;
#pragma unroll 1
        for (int i = 0; i < ahead; ++i, w_place.advance(1)) load_w(at, w_place, i);
        griddepcontrol_wait();
#pragma unroll 1
        for (; k < ahead; ++k, place.advance(1)) load_x(at, place, k);
      }
#pragma unroll 1
      for (; k < p.steps; ++k, place.advance(1)) {
        mbar_wait(place.empty(base), place.parity ^ 1);
        load_w(at, place, k);
        load_x(at, place, k);
      }
    }
    ++count;
    __syncwarp();
  }
}

// silu(gate) * up, or with CLAMP g sigmoid(alpha g) (u + 1); comparisons with NaN are false, so that NaN passes.
template <bool CLAMP>
__device__ __forceinline__ float activated(const Params& p, float gate, float up) {
  constexpr float kLog2E = 1.44269504f;
  float by = -kLog2E;
  if constexpr (CLAMP) {
    gate = gate > p.limit ? p.limit : gate;
    up = (up > p.limit ? p.limit : up < -p.limit ? -p.limit : up) + 1.f;
    by *= p.alpha;
  }
  return gate * rcp_approx(1.f + exp2_approx(by * gate)) * up;
}

// What a warpgroup needs to store its part of a tile.
struct Output {
  int n0, m0, end;         // first column and row of y, and the end of the expert's rows
  uint32_t buffer, other;  // staging: the one that is written next, and the other one
};

// Adds biases, in place.
template <class S, int WIDTH>
__device__ __forceinline__ void add_bias(const Params& p, float (&sums)[S::kBlocks][WIDTH / 2],
                                         const float (&bias)[S::kBlocks][2]) {
  if (p.bias == nullptr) return;
#pragma unroll
  for (int b = 0; b < S::kBlocks; ++b)
#pragma unroll
    for (int i = 0; i < WIDTH / 2; ++i) sums[b][i] += bias[b][i >> 1 & 1];
}

// Applies the activation, with `gated`: sums i and i + 2 of four are gate and up of one number of y. Rounds and stores a
// warpgroup's part of a tile, by chunks of rows of 64 columns of y, through two buffers in turn: a
// buffer is written again after the barrier of the chunk between, which all threads pass when they have read it.
// A row of a buffer is 128 bytes, whose pieces of 16 are exchanged by row % 8.
template <typename T, class S, int WIDTH>
__device__ __forceinline__ void store(const Params& p, const float (&sums)[S::kBlocks][WIDTH / 2],
                                      Output& out, int barrier) {
  constexpr int kFragments = WIDTH / 8, kMost = S::kStaged / 8;  // of 8 rows of y
  constexpr int kChunk = kMost >= 4 && kFragments % 4 == 0 ? 4 : kFragments % 2 == 0 ? 2 : 1;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3, matrix = lane >> 3, low = lane & 7;
  const int piece = threadIdx.x & 7, first_row = threadIdx.x >> 3 & 15;
  uint16_t* const y = static_cast<uint16_t*>(p.y);
  // The chunk is staged: pieces of 8 columns from column n on, if they are `there`, of rows m ...
  const auto write = [&](int n, bool there, int m) {
    bar_sync(barrier, 128);
    const uint32_t from = out.buffer + first_row * 128 + ((piece ^ (first_row & 7)) << 4);
    uint16_t* const to = y + static_cast<int64_t>(m + first_row) * p.out_n + n;
    constexpr int kReads = (kChunk * 8 + 15) / 16;
    uint4 words[kReads];
#pragma unroll
    for (int i = 0; i < kReads; ++i) words[i] = ld_shared<uint4>(from + i * 2048);
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      const int row = first_row + i * 16;
      if (there && row < kChunk * 8 && m + row < out.end)
        store_16(to + i * 16 * static_cast<int64_t>(p.out_n), words[i]);
    }
    const uint32_t written = out.buffer;
    out.buffer = out.other, out.other = written;
  };
  if (p.gated) {
    const int columns = p.w_rows >> 1, n = out.n0 + (piece >> 2) * columns + (piece & 3) * 8;
    const bool there = piece < S::kBlocks * 4 && (piece & 3) * 16 < p.w_rows && n < p.out_n;
#pragma unroll
    for (int first = 0; first < kFragments; first += kChunk) {
      uint32_t words[S::kBlocks][kChunk];
      const auto activate = [&](auto clamp) {
#pragma unroll
        for (int f = 0; f < kChunk; ++f)
#pragma unroll
          for (int b = 0; b < S::kBlocks; ++b) {
            const int i = (first + f) * 4;
            words[b][f] = packed<T>(activated<clamp.value>(p, sums[b][i], sums[b][i + 2]),
                                    activated<clamp.value>(p, sums[b][i + 1], sums[b][i + 3]));
          }
      };
      if (p.clamp)
        activate(std::true_type{});
      else
        activate(std::false_type{});
      // Matrices of 8 rows by a warp's 8 columns of a block.
      if constexpr (S::kBlocks == 2) {
        const uint32_t to = out.buffer + low * 128 + ((((matrix & 1) * 4 + warp) ^ low) << 4);
#pragma unroll
        for (int f = 0; f < kChunk; f += 2) {
          const uint32_t at = to + (f + (matrix >> 1)) * 1024;
          if constexpr (kChunk == 1)
            stmatrix_x2_trans(to, {words[0][f], words[1][f]});
          else
            stmatrix_x4_trans(at, {words[0][f], words[1][f], words[0][f + 1], words[1][f + 1]});
        }
      } else {
        const uint32_t to = out.buffer + low * 128 + ((warp ^ low) << 4);
        if constexpr (kChunk == 1) {  // the second matrix goes to rows that are not read
          stmatrix_x2_trans(to + (matrix & 1) * 1024, {words[0][0], 0u});
        } else {
#pragma unroll
          for (int f = 0; f < kChunk; f += 2)
            stmatrix_x2_trans(to + (f + (matrix & 1)) * 1024, {words[0][f], words[0][f + 1]});
        }
      }
      write(n, there, out.m0 + first * 8);
    }
  } else {
#pragma unroll
    for (int b = 0; b < S::kBlocks; ++b) {
      const int n = out.n0 + b * p.w_rows + piece * 8;
      const bool there = piece * 8 < p.w_rows && n < p.out_n;
#pragma unroll
      for (int first = 0; first < kFragments; first += kChunk) {
        const auto word = [&](int f, int half) {
          const int i = (first + f) * 4 + half * 2;
          return packed<T>(sums[b][i], sums[b][i + 1]);
        };
        // Matrices of 8 rows by the first or the second half of a warp's 16 columns.
        const uint32_t to = out.buffer + low * 128 + (((warp * 2 + (matrix & 1)) ^ low) << 4);
#pragma unroll
        for (int f = 0; f < kChunk; f += 2) {
          if constexpr (kChunk == 1)
            stmatrix_x2_trans(to, {word(0, 0), word(0, 1)});
          else
            stmatrix_x4_trans(to + (f + (matrix >> 1)) * 1024,
                              {word(f, 0), word(f, 1), word(f + 1, 0), word(f + 1, 1)});
        }
        write(n, there, out.m0 + first * 8);
      }
    }
  }
}

// Multiplies a tile's slots, `mine` of them, every SLICES-th from `place` on. signal: the number of the slot behind which
// the second warpgroup may begin, -1 for none.
template <typename T, class S, int WIDTH>
__device__ __forceinline__ void multiply(float (&sums)[S::kBlocks][WIDTH / 2], Place<S>& place, uint32_t base,
                                         uint32_t w_at, int mine, int signal) {
  const int lane = threadIdx.x & 31;
  const auto release = [&](uint32_t empty) {  // by each warp, to every CTA that copies into the slot
    if constexpr (S::kCluster > 1) {
      if (lane < S::kCluster) mbar_arrive_at_rank(empty, lane);
    } else {
      if (lane < kArrivingLanes) mbar_arrive(empty);
    }
  };
  const uint32_t first_a = static_cast<uint32_t>(swizzle128_descriptor(base + w_at)),
                 first_b = static_cast<uint32_t>(swizzle128_descriptor(base + S::kXRing));
  const uint64_t upper = swizzle128_descriptor(0) >> 32 << 32;
  uint32_t before = 0;  // the empty barrier of the slot before
#pragma unroll 1
  for (int i = 0; i < mine; ++i) {
    const uint32_t a = warp_uniform(first_a + place.index * (S::kWSlot / 16)),
                   b = warp_uniform(first_b + place.index * (S::kXSlot / 16));
    mbar_wait(place.full(base), place.parity);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < kStep / 16; ++s)
#pragma unroll
      for (int block = 0; block < S::kBlocks; ++block)
        Wgmma<T, WIDTH>::ss(sums[block], upper | (a + block * (kBlockBytes / 16) + s * 2),
                            upper | (b + s * 2), 1);
    wgmma_commit();
    if (i > 0) {
      wgmma_wait<1>();
      release(before);
    }
    before = place.empty(base);
    place.advance(S::kSlices);
    if (i == signal) bar_arrive(kBegin, 256);
  }
  wgmma_wait<0>();
#pragma unroll
  for (int block = 0; block < S::kBlocks; ++block) wgmma_fence_operand(sums[block]);
  release(before);
}

template <typename T, class S>
__device__ __forceinline__ void product(const Params& p, const CUtensorMap& w_map, const CUtensorMap& x_map,
                                        uint8_t* smem) {
  // A CTA may leave once no other one copies into its ring or arrives at its barriers.
  const auto leave = [] {
    __syncwarp();
    if constexpr (S::kCluster > 1) cluster_sync();
  };
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  const uint32_t base = smem_u32_once(smem);
  const GroupedList list{reinterpret_cast<int*>(smem + S::kList),
                         reinterpret_cast<int*>(smem + S::kList) + p.list.experts + 1};
  if (threadIdx.x == 0) {
    prefetch_tensormap(&w_map), prefetch_tensormap(&x_map);
    for (int i = 0; i < S::kSlots; ++i) {
      mbar_init(base + S::kBars + i * 8, 1);
      mbar_init(base + S::kBars + (S::kSlots + i) * 8,
                S::kGroups * 4 * (S::kCluster > 1 ? S::kCluster : kArrivingLanes));
    }
    fence_mbarrier_init();
  }
  if constexpr (S::kCluster > 1) cluster_sync();  // barriers are there before another CTA's copies
  if (!p.early) griddepcontrol_wait();
  list.build<S::kTokens>(p.list);
  // After the wait, so that the next kernel may also read what the kernel before this one waited for.
  griddepcontrol_launch_dependents();
  const int tiles = list.first[p.list.experts] * p.list.blocks;

  if (warp >= S::kWarpgroups * 4) {
    setmaxnreg_dec<S::kProducerRegisters>();
    const int role = warp - S::kWarpgroups * 4;
    if (role == 0) produce<S>(p, list, w_map, x_map, smem, base, tiles);
    if (role == 1 && p.clear) {
      griddepcontrol_wait();
      for (int64_t row = list.starts[p.list.experts] + blockIdx.x; row < p.rows; row += gridDim.x)
        for (int n = lane * 8; n < p.out_n; n += 256)
          *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.y) + row * p.out_n + n) = make_uint4(0, 0, 0, 0);
    }
    leave();
    return;
  }
  setmaxnreg_inc<S::kConsumerRegisters>();
  const int warpgroup = warp >> 2, slice = warpgroup / S::kGroups, group = warpgroup % S::kGroups;
  const int columns = p.gated ? p.w_rows >> 1 : p.w_rows;  // of y, of a block
  const int mine = (p.steps + S::kSlices - 1 - slice) / S::kSlices;
  constexpr bool kLags = S::kGroups == 2 && S::kSlices == 1;
  const uint32_t staging = base + S::kStaging + group * (2 * S::kStageBytes);
  // Sums of slice `from`, a float4 of a thread after the other.
  const auto exchange = [&](int from) {
    return base + S::kExchangeAt + ((from - 1) * S::kGroups + group) * (S::kSums * 512) +
           (threadIdx.x & 127) * 16;
  };
  const int start = blockIdx.x / S::kCluster, step = gridDim.x / S::kCluster;
  Output out{0, 0, 0, staging, staging + S::kStageBytes};
  Place<S> first;  // of the tile
  int count = 0;
  griddepcontrol_wait();
  if (kLags && p.lag > 0 && group == 1 && start < tiles) bar_sync(kBegin, 256);
#pragma unroll 1
  for (int index = start; index < tiles; index += step, ++count) {
    Place<S> place = first;
    if constexpr (S::kSlices > 1) place.advance(slice);
    mbar_wait(place.full(base), place.parity);
    const int4 tile = *reinterpret_cast<const int4*>(smem + S::kInfos + count % kTileInfos * 16);
    const int expert = tile.x, block = tile.y, rows = warp_uniform(tile.w - tile.z);
    out.n0 = (block * S::kGroups + group) * S::kBlocks * columns, out.m0 = tile.z, out.end = tile.w;
    float bias[S::kBlocks][2] = {};
    if (p.bias != nullptr && slice == 0) {
      const T* const of_expert = static_cast<const T*>(p.bias) + static_cast<int64_t>(expert) * p.n;
#pragma unroll
      for (int b = 0; b < S::kBlocks; ++b)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          // Rows r and r + 8 of the warp's 16, which with `gated` are gate and up.
          const int r = lane >> 2, w = warp & 3;
          const int n = out.n0 + b * columns + (p.gated ? w * 8 + r : w * 16 + h * 8 + r);
          if (n < p.out_n) bias[b][h] = Num<T>::to_float(of_expert[n + (p.gated ? h * p.out_n : 0)]);
        }
    }
    const int signal = kLags && p.lag > 0 && group == 0 && count == 0 ? min(p.lag, mine) - 1 : -1;
    at_width(typename S::Widths{}, rows, [&](auto width) {
      constexpr int kWidth = width.value;
      float sums[S::kBlocks][kWidth / 2] = {};  // without it registers of all widths would be live at once
      multiply<T, S, kWidth>(sums, place, base, group * (S::kBlocks * kBlockBytes), mine, signal);
      if constexpr (S::kSlices > 1) {
        constexpr int kQuads = kWidth / 8;
        constexpr int kAll = S::kSlices * 128;  // of a group
        if (slice > 0) {
          if (count > 0) bar_sync(kFree + group, kAll);
#pragma unroll
          for (int f = 0; f < kQuads; ++f)
            st_shared(exchange(slice) + f * 2048, make_float4(sums[0][f * 4], sums[0][f * 4 + 1],
                                                              sums[0][f * 4 + 2], sums[0][f * 4 + 3]));
          bar_arrive(kFull + group, kAll);
          return;
        }
        bar_sync(kFull + group, kAll);
#pragma unroll
        for (int s = 1; s < S::kSlices; ++s)
#pragma unroll
          for (int f = 0; f < kQuads; ++f) {
            float part[4];
            ld_shared(part, exchange(s) + f * 2048);
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[0][f * 4 + i] += part[i];
          }
        if (index + step < tiles) bar_arrive(kFree + group, kAll);
      }
      add_bias<S, kWidth>(p, sums, bias);
      store<T, S, kWidth>(p, sums, out, group + 1);
    });
    if constexpr (S::kSlices > 1)
      first.advance(p.next_index, p.next_parity);
    else
      first = place;
  }
  leave();
}

}  // namespace gm::dense
#endif
