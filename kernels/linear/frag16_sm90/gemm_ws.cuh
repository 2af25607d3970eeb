// Schedule gemm_ws: y[M, N] = x[M, K] · W[N, K]^T at any M, a warp-specialised, persistent product.
//
// The product is transposed, Y^T = W X^T: decoded weights are wgmma's register operand, so a weight is
// decoded once for MT rows of x and never touches shared memory again; x is the shared operand. A CTA owns C
// blocks of 64 rows of W and MT rows of x:
//  - Producer warpgroup: two threads fill a ring each, of weights (a slot is a group of 128 k, by bulk copies) and of x
//    (64 k per slot, by TMA in the 128-byte swizzle). Weights do not depend on the previous kernel: their copies are
//    issued before griddepcontrol.wait.
//  - Consumer warpgroups: 64 rows of W each. The 16 k of a product are decoded while the previous product runs.
// CTAs are persistent: copies of the next tile overlap with the epilogue, and one half of the warpgroups may be
// staggered behind the other, so that its products overlap with it too. Tiles that do not fill a wave are split along
// K: by stream-K, with partial sums in scratch memory; or over the CTAs of a cluster, which reduce them in the order of
// ranks; or, with one tile per CTA, over warpgroups of the same rows of W, which reduce them in shared memory in the
// order of slices. Every order is fixed.
//
// With `gated`, y = silu(gate) * up of the two halves of the rows of W: half of a CTA's warps have rows of gate, the others
// the same rows of up, and each exchanges half of its sums with its counterpart through shared memory.
#pragma once
#include "decoders_wgmma.cuh"
#include "gemm_ws_tiles.cuh"
#include "sm90/tma.cuh"
#include "sm90/wgmma.cuh"

#ifdef __CUDACC__
#include <cuda.h>

namespace gm {

// State of a pipeline of N slots of SIZE bytes at offset SLOTS of shared memory: the addresses of the current slot and
// of its full barrier (at offset BARS, N * 8 before the empty one), and the phase parity.
template <int N, int SIZE, int SLOTS, int BARS>
struct Ring {
  uint32_t slot, full, parity = 0;
  __device__ __forceinline__ Ring(uint32_t base, int first = 0)
      : slot(base + SLOTS + first * SIZE), full(base + BARS + first * 8) {}
  __device__ __forceinline__ uint32_t empty() const { return full + N * 8; }
  template <int STEPS = 1>
  __device__ __forceinline__ void next(uint32_t base) {
    slot += STEPS * SIZE, full += STEPS * 8;
    if constexpr (STEPS == 1) {
      if (full == base + BARS + N * 8) slot = base + SLOTS, full = base + BARS, parity ^= 1;
    } else {
      if (full >= base + BARS + N * 8) slot -= N * SIZE, full -= N * 8, parity ^= 1;
    }
  }
};

// Main loop of a tile: `groups` groups of 128 k of a warpgroup's slice. part[0] has the first 64 k of the first group;
// a: buffers of decoded operands. The last products are still in flight at the end. Returns the empty barrier of their
// slot of x.
//   release(bar)    arrives at an empty barrier of x
//   landed()        called when a slot of x is full
template <typename W, int MT, int SLICES, int CHAINS, int PENDING, typename XRing, typename WRing,
          typename Release, typename Landed>
__device__ __forceinline__ uint32_t multiply_groups(float (&acc)[CHAINS][MT / 2],
                                                    uint32_t (&a)[PENDING + 1][4], W& weights,
                                                    typename W::Part (&part)[2], XRing& x, WRing& w,
                                                    uint32_t base, uint32_t my_tile, int groups,
                                                    const int& scales_half, const Release& release,
                                                    const Landed& landed) {
  using T = typename W::Type;
  constexpr int kBuffers = PENDING + 1;
  const int lane = threadIdx.x & 31;
  uint32_t last_x = 0;
  int add = 0;
#pragma unroll 1
  for (int left = groups; left > 0; --left) {
    part[1].load(w.slot + my_tile, lane, 1);
    weights.decode(0, part[0], a[0], scales_half);
    uint64_t rows = 0;
#pragma unroll
    for (int s = 0; s < 8; ++s) {
      if (s % 4 == 0) {
        mbar_wait(x.full, x.parity);
        landed();
        rows = swizzle128_descriptor(x.slot);
      }
      wgmma_fence();
      Wgmma<T, MT>::rs(acc[s % CHAINS], a[s % kBuffers], rows + (s & 3) * 2,
                       s >= CHAINS ? 1 : add);  // 16 k are 32 bytes
      wgmma_commit();
      wgmma_wait<PENDING>();  // operands of completed products may be overwritten
      if (s % 4 == PENDING - 1 && (s > 3 || add != 0)) release(last_x);
      if (s == 3) last_x = x.empty(), x.next(base);
      if (s == 7) last_x = x.empty(), x.template next<2 * SLICES - 1>(base);
      if (s == 0) {
        // An arrival may be reordered before the loads of the codes, so it is made to depend on them.
        const uint32_t zero = opaque_zero();
        if ((lane | ((part[0].any(0) | part[1].any(1)) & zero)) < kArrivingLanes) mbar_arrive(w.empty());
        w.template next<SLICES>(base);
      }
      if (s == 3 && left > 1) {
        mbar_wait(w.full, w.parity);
        part[0].load(w.slot + my_tile, lane, 0);
      }
      if (s < 7) weights.decode(s + 1, part[(s + 1) >> 2], a[(s + 1) % kBuffers], scales_half);
    }
    add = 1;
  }
  return last_x;
}

// Copies the weights of a tile of y with `gated`, `count` groups from k on: C blocks of 32 rows of gate from `block` on, and
// the same of up. TILES tiles of gate and of up alternate in a slot; TILE: bytes of one.
template <int C, int TILES, int TILE, typename WRing>
__device__ __forceinline__ void copy_gated(const GemmParams& p, WRing& w, uint32_t base, int block, int k,
                                           int count, uint64_t policy) {
  constexpr int kHalf = 2 * TILE, kHalves = TILES / 2;  // bytes of 32 rows; how many of them until up follows
  const int blocks = p.n / 32, here = min(C, blocks - block);
  const int64_t block_bytes = static_cast<int64_t>(p.groups) * (2 * kHalf);
  const auto rows32 = [&](int index) {
    return p.w + (index >> 1) * block_bytes + k * (2 * kHalf) + (index & 1) * kHalf;
  };
  if (here == C && (kHalves == 1 || blocks % 2 == 0)) {
    const uint8_t *gate = rows32(block), *up = rows32(blocks + block);
#pragma unroll 1
    for (; count > 0; --count, gate += 2 * kHalf, up += 2 * kHalf) {
      mbar_wait(w.empty(), w.parity ^ 1);
      mbar_arrive_expect_tx(w.full, C * 2 * kHalf);
#pragma unroll
      for (int b = 0; b < C / kHalves; ++b) {
        const uint32_t to = w.slot + b * 2 * kHalves * kHalf;
        bulk_load(to, gate + b * block_bytes, kHalves * kHalf, w.full, policy);
        bulk_load(to + kHalves * kHalf, up + b * block_bytes, kHalves * kHalf, w.full, policy);
      }
      w.next(base);
    }
  } else {  // the last rows, or rows of up that begin within a block
#pragma unroll 1
    for (; count > 0; --count, ++k) {
      mbar_wait(w.empty(), w.parity ^ 1);
      mbar_arrive_expect_tx(w.full, here * 2 * kHalf);
#pragma unroll 1
      for (int i = 0; i < C * 2; ++i) {
        const int half = i / (2 * kHalves) * kHalves + i % kHalves;
        if (half < here)
          bulk_load(w.slot + i * kHalf, rows32(block + half + (i & kHalves ? blocks : 0)), kHalf, w.full,
                    policy);
      }
      w.next(base);
    }
  }
}

// W: the kind of weight, a class of decoders_wgmma.cuh.  MT, C, SLICES, CTAS: see Cta.  XS, WS: slots of the rings.
// CHAINS: accumulators that products alternate, where one is too short to hide the latency of the one before.
// PENDING: products in flight.  smem: dynamic shared memory, aligned to 1024 bytes.
template <typename W, int MT, int C, int SLICES, int CTAS, int XS, int WS, int CHAINS, int PENDING>
__device__ __forceinline__ void linear_gemm_ws(const GemmParams& p, const CUtensorMap& x_map, uint8_t* smem) {
  using T = typename W::Type;
  using Shape = Cta<MT, C, SLICES, CTAS>;
  static_assert(XS % (2 * SLICES) == 0 && WS % SLICES == 0 ||
                SLICES == 1);  // a slice always has the same slots
  static_assert(!Shape::kExchangesInX || (SLICES - 1) * C * MT * 256 <= XS * MT * kXSlotK * 2);
  constexpr int kTile = W::kBytes, kXSlot = MT * kXSlotK * 2, kWSlot = C * 4 * kTile,
                kThreads = C * SLICES * 128;
  constexpr int kFragments = Shape::kFragments, kStored = Shape::kPairs;
  constexpr int kParts = MT == 32 ? 4 : 1;  // parts of a sum loaded at a time
  constexpr int kPairBarriers = 2;          // named barriers of two warps; 1 is that of slices
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  const uint32_t base = smem_u32_once(smem);
  constexpr int kWRing = XS * kXSlot, kStaging = kWRing + WS * kWSlot, kStagingSize = 512 * kStored;
  constexpr int kExchange = kStaging + C * SLICES * 4 * kStagingSize, kBars = kExchange + Shape::kExchange;
  // Barriers by which the first warpgroup signals that it has consumed a slot of x.
  constexpr int kStaggerBars = kBars + (XS + WS) * 16;
  using XRing = Ring<XS, kXSlot, 0, kBars>;
  using WRing = Ring<WS, kWSlot, kWRing, kBars + XS * 16>;
  // By one thread, with addresses known at compile time: spread over lanes it would become a loop.
  if (threadIdx.x == 0) {
    const XRing x(base);
    const WRing w(base);
    for (int i = 0; i < XS; ++i)
      mbar_init(x.full + i * 8, 1), mbar_init(x.empty() + i * 8, C * 4 * kArrivingLanes);
    for (int i = 0; i < WS; ++i)
      mbar_init(w.full + i * 8, 1), mbar_init(w.empty() + i * 8, C * 4 * kArrivingLanes);
    if constexpr (Shape::kStaggered)
      for (int i = 0; i < XS; ++i) mbar_init(base + kStaggerBars + i * 8, 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  griddepcontrol_launch_dependents();

  if (warp >= C * SLICES * 4) {
    setmaxnreg_dec<Shape::kProducerRegisters>();
    // All slots are empty at first: a wait for the phase before the first one succeeds.
    if (threadIdx.x == kThreads) {
      prefetch_tensormap(&x_map);  // after the barrier, which would wait for it
      TileScheduler scheduler(p);
      XRing x(base);
      int index, k;
#pragma unroll 1
      for (int groups; (groups = scheduler.next(p, index, k)) > 0;) {
        const int row = tile_at(p, index).m * MT;
        k *= kTileK;
        griddepcontrol_wait();  // after the scheduler's first divisions
#pragma unroll 1
        for (int h = groups * 2; h > 0; --h, k += kXSlotK) {
          mbar_wait(x.empty(), x.parity ^ 1);
          mbar_arrive_expect_tx(x.full, kXSlot);
          tma_load(x.slot, &x_map, k, row, x.full);
          x.next(base);
        }
      }
    } else if (threadIdx.x == kThreads + 32) {  // weights are constant: no griddepcontrol.wait
      TileScheduler scheduler(p);
      WRing w(base);
      const uint64_t policy = p.m_tiles > 1 ? l2_evict_normal() : l2_evict_first();
      int index, k;
#pragma unroll 1
      for (int groups; (groups = scheduler.next(p, index, k)) > 0;) {
        const int block = tile_at(p, index).n * C, here = p.tiles16 - block * 4;
        const int64_t block_bytes = static_cast<int64_t>(p.groups) * (4 * kTile);
        const uint8_t* from = p.w + block * block_bytes;
        if (p.gated) {
          copy_gated<C, Shape::kGatedTiles, kTile>(p, w, base, block, k, groups, policy);
        } else if (here >= C * 4) {  // not as max(0, min(here, C * 4)): ptxas 13.0 miscompiled the branch
          from += k * (4 * kTile);
#pragma unroll 1
          for (int left = groups; left > 0; --left, from += 4 * kTile) {
            mbar_wait(w.empty(), w.parity ^ 1);
            mbar_arrive_expect_tx(w.full, kWSlot);
#pragma unroll
            for (int b = 0; b < C; ++b)
              bulk_load(w.slot + b * 4 * kTile, from + b * block_bytes, 4 * kTile, w.full, policy);
            w.next(base);
          }
        } else {  // the last rows of W
#pragma unroll 1
          for (int last = k + groups; k < last; ++k) {
            mbar_wait(w.empty(), w.parity ^ 1);
            mbar_arrive_expect_tx(w.full, here * kTile);
#pragma unroll 1
            for (int b = 0; b * 4 < here; ++b) {
              const int bytes = min(4, here - b * 4) * kTile;
              bulk_load(w.slot + b * 4 * kTile, from + b * block_bytes + k * static_cast<int64_t>(bytes),
                        bytes, w.full, policy);
            }
            w.next(base);
          }
        }
      }
    }
    __syncwarp();
    if (p.log_split > 0) {
      cluster_sync();
      cluster_sync();
    }
  } else {
    setmaxnreg_inc<Shape::kConsumerRegisters>();
    TileScheduler scheduler(p);
    const int slice = SLICES == 1 ? 0 : warp / (C * 4),
              my_rows = SLICES == 1 ? warp : warp % (C * 4);  // 16 of W
    XRing x(base, slice * 2);
    WRing w(base, slice);
    const uint32_t my_tile = my_rows * kTile, staging = base + kStaging + warp * kStagingSize;
    griddepcontrol_wait();

    const bool leads = Shape::kStaggered && p.lag > 0 && threadIdx.x == 0;
    const auto release = [&](uint32_t slot) {
      if (lane < kArrivingLanes) mbar_arrive(slot);
      if (leads) mbar_arrive(slot + (kStaggerBars - kBars - XS * 8));
    };
    int index, k;
#pragma unroll 1
    // The shuffle tells the compiler that the value is uniform.
    for (int groups; (groups = __shfl_sync(0xffffffffu, scheduler.next(p, index, k), 0)) > 0;) {
      // Never 0: a tile has at least as many groups as slices.
      const int mine = (groups + SLICES - 1 - slice) / SLICES;
      float acc[CHAINS][MT / 2];
      uint32_t a[PENDING + 1][4];
      // Hides the latency of the epilogue's load.
      if (p.row_scale != nullptr && lane == 0) {
        const RowTile at = row_tile<Shape::kGatedTiles>(p, tile_at(p, index).n * C * 4 + my_rows);
        if (at.column < p.n) prefetch_l2(p.row_scale + at.row);
      }
      // Staggers the second half of the warpgroups, so that one half multiplies while the other stores.
      if (Shape::kStaggered && p.lag > 0 && warp >= C * 2) {
        const int slots = min(p.lag, groups) * 2 - 1;
        uint32_t bar = x.full + (kStaggerBars - kBars) + slots * 8;
        const bool wraps = bar >= base + kStaggerBars + XS * 8;
        mbar_wait(wraps ? bar - XS * 8 : bar, wraps ? x.parity ^ 1 : x.parity);
      }
      typename W::Part part[2];
      W weights;
      mbar_wait(w.full, w.parity);
      part[0].load(w.slot + my_tile, lane, 0);
      const uint32_t last_x = multiply_groups<W, MT, SLICES, CHAINS, PENDING>(
          acc, a, weights, part, x, w, base, my_tile, mine, p.scales_half, release, [] {});
      // Loads the operands of the epilogue while the last products run.
      const Tile tile = tile_at(p, index);
      const RowTile at = row_tile<Shape::kGatedTiles>(p, tile.n * C * 4 + my_rows);
      const int n0 = at.column, m0 = tile.m * MT + slice * kFragments * 8;
      float bias[2] = {0.f, 0.f}, by[2] = {W::kFactor, W::kFactor};
      const int row = at.row + (lane >> 2), left = p.n - n0 - (lane >> 2);
      if (p.row_scale != nullptr) {
        if (left > 0) by[0] = p.row_scale[row];
        if (left > 8) by[1] = p.row_scale[row + 8];
      }
      if (p.bias != nullptr) {
        if (left > 0) bias[0] = Num<T>::to_float(static_cast<const T*>(p.bias)[row]);
        if (left > 8) bias[1] = Num<T>::to_float(static_cast<const T*>(p.bias)[row + 8]);
      }
      wgmma_wait<0>();
      release(last_x);
      if constexpr (CHAINS == 2) {
#pragma unroll
        for (int i = 0; i < MT / 2; ++i) acc[0][i] += acc[1][i];
      }
      float (&sum)[MT / 2] = acc[0];
      if constexpr (SLICES > 1) {
        // Each slice reduces its share of the rows of x, in the order of slices, and sends the other rows' sums to the
        // slices that own them.
        const auto place = [&](int owner, int from, int f) {  // from: of the SLICES - 1 others
          return base + (Shape::kExchangesInX ? 0 : kExchange) +
                 (((owner * (SLICES - 1) + from) * kFragments + f) * 128 + (threadIdx.x & 127)) * 16;
        };
        if constexpr (Shape::kExchangesInX) bar_sync(1, kThreads);  // until all slices have read their last x
#pragma unroll
        for (int f = 0; f < SLICES * kFragments; ++f)
          if (f / kFragments != slice)
            st_shared(place(f / kFragments, slice - (slice > f / kFragments), f % kFragments),
                      make_float4(sum[f * 4], sum[f * 4 + 1], sum[f * 4 + 2], sum[f * 4 + 3]));
        bar_sync(1, kThreads);
#pragma unroll
        for (int f = 0; f < kFragments; ++f) {
          float all[4];
#pragma unroll
          for (int o = 0; o < SLICES; ++o) {
            float v[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) v[i] = sum[(o * kFragments + f) * 4 + i];
            if (o != slice) ld_shared(v, place(slice, o - (o > slice), f));
#pragma unroll
            for (int i = 0; i < 4; ++i) all[i] = o == 0 ? v[i] : all[i] + v[i];
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[f * 4 + i] = all[i];
        }
      }

      if (groups < p.groups && p.log_split == 0) {
        // Stream-K fix-up: partial sums are stored in accumulator layout, with a flag per warp. The CTA with the first
        // groups of a tile adds those of the others, in the order of k.
        constexpr int kPartBytes = MT * C * 256;
        uint32_t* flags = reinterpret_cast<uint32_t*>(p.scratch);
        uint8_t* parts = p.scratch + kFlagBytes;
        int first = TileScheduler::part();
        const auto flag_of = [&](int part) { return flags + part * C * SLICES * 4 + warp; };
        const auto sums_of = [&](int part) {
          return reinterpret_cast<float4*>(parts + static_cast<int64_t>(part) * kPartBytes) + threadIdx.x;
        };
        if (k > 0) {
          float4* to = sums_of(first);
#pragma unroll
          for (int f = 0; f < kFragments; ++f)
            __stcg(to + f * kThreads,
                   make_float4(sum[f * 4], sum[f * 4 + 1], sum[f * 4 + 2], sum[f * 4 + 3]));
          __syncwarp();
          if (lane == 0) st_release(flag_of(first), 1);
          continue;
        }
        const int end = (index + 1) * p.groups;
        for (int count = 32; count == 32;) {  // the flags of 32 parts at a time, one per lane
          const bool there = TileScheduler::begin(p, ++first + lane) < end;
          uint32_t* flag = flag_of(first + lane);
          uint32_t set = 1;
          do {  // ends by a vote, so that the warp stays converged
            if (there) set = ld_acquire(flag);
          } while (__any_sync(0xffffffffu, set == 0));
          __syncwarp();
          if (there) *flag = 0;
          count = __popc(__ballot_sync(0xffffffffu, there));
#pragma unroll(kParts)
          for (int part = first; part < first + count; ++part) {
            const float4* from = sums_of(part);
#pragma unroll
            for (int f = 0; f < kFragments; ++f) {
              const float4 v = __ldcg(from + f * kThreads);
              sum[f * 4] += v.x, sum[f * 4 + 1] += v.y, sum[f * 4 + 2] += v.z, sum[f * 4 + 3] += v.w;
            }
          }
          first += 31;
        }
      }

      const auto store = [&](const auto& v, int first, int end) {
        constexpr int kPairs = sizeof(v) / 32,
                      kPart = kPairs < Shape::kGatedPairs ? kPairs : Shape::kGatedPairs;
        if (!p.gated) {
          store_fragments<T, kPairs>(p, v, by, bias, staging, n0, first, end);
          return;
        }
        constexpr int kTiles = Shape::kGatedTiles;
        const bool has_up = (warp & kTiles) != 0;
#pragma unroll
        for (int part = 0; part < kPairs; part += kPart) {
          float some[kPart * 8];
#pragma unroll
          for (int i = 0; i < kPart * 8; ++i) some[i] = v[part * 8 + i];
          store_gated<T, kPart>(p, some, by, bias, staging,
                                has_up ? staging - kTiles * kStagingSize : staging + kTiles * kStagingSize,
                                has_up, kPairBarriers + warp / (2 * kTiles) * kTiles + warp % kTiles, n0,
                                first + part * 16, end);
        }
      };
      if (p.log_split == 0) {
#pragma unroll
        for (int f = 0; f < kFragments; f += kStored * 2) {
          float v[kStored * 8];
#pragma unroll
          for (int i = 0; i < kStored * 8; ++i) v[i] = sum[f * 4 + i];
          store(v, m0 + f * 8, p.m);
        }
      } else {
        // Once every CTA of the cluster has drained its rings, they are reused for partial sums. Each CTA owns a share
        // of the fragments.
        __syncwarp();
        cluster_sync();
        const int split = 1 << p.log_split, rank = blockIdx.x & (split - 1),
                  share = kFragments >> p.log_split;
#pragma unroll
        for (int f = 0; f < kFragments; ++f) {
          const int owner = f / share;
          const uint32_t to = base + ((rank * share + f - owner * share) * kThreads + threadIdx.x) * 16;
          st_cluster(mapa(to, owner),
                     make_float4(sum[f * 4], sum[f * 4 + 1], sum[f * 4 + 2], sum[f * 4 + 3]));
        }
        cluster_sync();
#pragma unroll 1
        for (int f = 0; f < share; f += 2) {
          float v[8] = {};
#pragma unroll
          for (int i = 0; i < 2; ++i)
            for (int r = 0; r < split && f + i < share; ++r) {
              const float4 part =
                  reinterpret_cast<const float4*>(smem)[(r * share + f + i) * kThreads + threadIdx.x];
              v[i * 4] += part.x, v[i * 4 + 1] += part.y, v[i * 4 + 2] += part.z, v[i * 4 + 3] += part.w;
            }
          const int first = rank * share + f, end = first + min(2, share - f);
          store(v, m0 + first * 8, min(p.m, m0 + end * 8));
        }
      }
    }
  }
}

}  // namespace gm
#endif
