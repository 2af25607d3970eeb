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
// Where shared memory has room for a whole tile of y, TMA stores it while the next one is multiplied.
//
// GATED: y = silu(gate) * up of the two halves of the rows of W: half of a warpgroup has rows of gate, the other half the
// same rows of up, and each warp exchanges half of its sums with its counterpart through shared memory.
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

// Copies the weights of a tile of silu(gate) * up, `count` groups from k on: C blocks of 32 rows of gate from `block` on, each
// followed by the same rows of up. TILE: bytes of 16 rows.
template <int C, int TILE, typename WRing>
__device__ __forceinline__ void copy_gated(const GemmParams& p, WRing& w, uint32_t base, int block, int k,
                                           int count, uint64_t policy) {
  constexpr int kHalf = 2 * TILE;  // bytes of 32 rows, of which W has pairs
  const int blocks = p.n / 32, here = min(C, blocks - block), up_block = blocks + block;
  // Opaque, so that nothing of it is kept from tile to tile: a producer has few registers.
  const int64_t block_bytes = static_cast<int64_t>(p.groups + opaque_zero()) * (2 * kHalf);
  const auto rows32 = [&](int index) {
    return p.w + (index >> 1) * block_bytes + k * (2 * kHalf) + (index & 1) * kHalf;
  };
  if (here == C) {
    const uint8_t *gate = rows32(block), *up = rows32(up_block);
    // From the first 32 rows to the second: these may begin the next 64.
    const uint32_t stride = static_cast<uint32_t>(block_bytes), step = block & 1 ? stride - kHalf : kHalf,
                   up_step = up_block & 1 ? stride - kHalf : kHalf;
#pragma unroll 1
    for (; count > 0; --count, gate += 2 * kHalf, up += 2 * kHalf) {
      mbar_wait(w.empty(), w.parity ^ 1);
      mbar_arrive_expect_tx(w.full, C * 2 * kHalf);
#pragma unroll
      for (int b = 0; b < C; ++b) {
        const uint32_t to = w.slot + b * 2 * kHalf;
        bulk_load(to, gate + (b >> 1) * stride + (b & 1) * step, kHalf, w.full, policy);
        bulk_load(to + kHalf, up + (b >> 1) * stride + (b & 1) * up_step, kHalf, w.full, policy);
      }
      w.next(base);
    }
  } else {  // the last rows
#pragma unroll 1
    for (; count > 0; --count, ++k) {
      mbar_wait(w.empty(), w.parity ^ 1);
      mbar_arrive_expect_tx(w.full, here * 2 * kHalf);
#pragma unroll 1
      for (int b = 0; b < here * 2; ++b)
        bulk_load(w.slot + b * kHalf, rows32((b & 1 ? up_block : block) + (b >> 1)), kHalf, w.full, policy);
      w.next(base);
    }
  }
}

// W: the kind of weight, a class of decoders_wgmma.cuh.  MT, C, SLICES, CTAS: see Cta.  XS, WS: slots of the rings.
// CHAINS: accumulators that products alternate, where one is too short to hide the latency of the one before.
// PENDING: products in flight.  smem: dynamic shared memory, aligned to 1024 bytes.
template <typename W, bool GATED, int MT, int C, int SLICES, int CTAS, int XS, int WS, int CHAINS,
          int PENDING>
__device__ __forceinline__ void linear_gemm_ws(const GemmParams& p, const CUtensorMap& x_map,
                                               const CUtensorMap& y_map, uint8_t* smem) {
  using T = typename W::Type;
  using Shape = Cta<MT, C, SLICES, CTAS, XS, WS, W::kBytes>;
  static_assert(XS % (2 * SLICES) == 0 && WS % SLICES == 0 ||
                SLICES == 1);  // a slice always has the same slots
  static_assert(!Shape::kExchangesInX || (SLICES - 1) * C * MT * 256 <= XS * MT * kXSlotK * 2);
  constexpr int kTile = W::kBytes, kXSlot = MT * kXSlotK * 2, kWSlot = C * 4 * kTile,
                kThreads = C * SLICES * 128;
  constexpr int kFragments = Shape::kFragments, kStored = Shape::kPairs;
  constexpr int kParts = MT == 32 ? 4 : 1;  // parts of a sum loaded at a time
  constexpr bool kByTma = Shape::kWhole && !GATED;
  constexpr int kPairBarriers = 2;  // named barriers of two warps; 1 is that of slices
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  smem += Shape::kStaging;  // which is in front of the rings
  const uint32_t base = smem_u32_once(smem);
  constexpr int kWRing = XS * kXSlot, kExchange = kWRing + WS * kWSlot, kBars = kExchange + Shape::kExchange;
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
        if constexpr (GATED) {
          copy_gated<C, kTile>(p, w, base, block, k, groups, policy);
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
    const uint32_t my_tile = my_rows * kTile, staging = base - Shape::kStaging + warp * Shape::kWarpStaging;
    griddepcontrol_wait();

    const auto release = [&](uint32_t slot) {
      if (lane < kArrivingLanes) mbar_arrive(slot);
    };
    // The second half of the warpgroups begins when more slots of x have arrived, so that one half multiplies while the
    // other one stores. The halves stay apart: each of them alone has the tensor cores while the other one stores.
    if (Shape::kStaggered && p.lag > 0 && warp >= Shape::kLeading * 4) mbar_wait(x.full + p.lag * 16, 0);
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
        const RowTile at = row_tile<GATED>(p, tile_at(p, index).n * C * 4 + my_rows);
        if (at.column < p.n) prefetch_l2(p.row_scale + at.row);
      }
      typename W::Part part[2];
      W weights;
      mbar_wait(w.full, w.parity);
      part[0].load(w.slot + my_tile, lane, 0);
      const uint32_t last_x = multiply_groups<W, MT, SLICES, CHAINS, PENDING>(
          acc, a, weights, part, x, w, base, my_tile, mine, p.scales_half, release, [] {});
      // Loads the operands of the epilogue while the last products run.
      const Tile tile = tile_at(p, index);
      const RowTile at = row_tile<GATED>(p, tile.n * C * 4 + my_rows);
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

      const int in_group = warp & 3, group_n0 = n0 - in_group * kTileRows;
      const uint32_t group_staging = staging - in_group * Shape::kWarpStaging;
      const auto store = [&](const auto& v, int first, int end) {
        constexpr int kPairs = sizeof(v) / 32,
                      kPart = kPairs < Shape::kGatedPairs ? kPairs : Shape::kGatedPairs;
        if constexpr (GATED) {
          const bool has_up = (warp & kGatedTiles) != 0;
          const uint32_t theirs = staging + (has_up ? -kGatedTiles : kGatedTiles) * Shape::kWarpStaging;
          const int barrier = kPairBarriers + warp / 4 * kGatedTiles + warp % kGatedTiles;
#pragma unroll
          for (int part = 0; part < kPairs; part += kPart) {
            float some[kPart * 8];
#pragma unroll
            for (int i = 0; i < kPart * 8; ++i) some[i] = v[part * 8 + i];
            store_gated<T, kPart>(p, some, by, bias, staging, theirs, has_up, barrier, n0, first + part * 16,
                                  end);
          }
        } else {
          store_fragments<T, kPairs, 4>(p, v, by, bias, group_staging, group_n0, first, end,
                                        kPairBarriers + warp / 4);
        }
      };
      if (kByTma && p.by_tma) {
        if constexpr (kByTma)
          store_whole<T, MT / 16>(y_map, sum, by, bias, group_staging, group_n0, m0,
                                  kPairBarriers + warp / 4);
      } else if (p.log_split == 0) {
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
    if (kByTma && (threadIdx.x & 127) == 0) tma_store_wait_read();  // of the last tile
  }
}

}  // namespace gm
#endif
