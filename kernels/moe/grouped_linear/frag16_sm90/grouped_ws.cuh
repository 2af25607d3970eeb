// Schedule grouped_ws: the products of experts, y[p, :] = x[token of p, :] . W[expert of p]^T,
// warp-specialised and persistent, at any number of rows per expert.
//
// The products are those of gemm_ws (linear/frag16_sm90/gemm_ws.cuh): Y^T = W X^T, decoded weights are
// wgmma's register operand, so that an expert's last tile wastes at most 7 rows of x. What differs:
//  - Rows are sorted by expert. Every CTA builds the list of tiles from the offsets, so that the host knows nothing of
//    the routing.
//  - Rows of x are gathered by two warps (cp.async, in wgmma's swizzle) or, if they are sorted already, copied by TMA.
//    Rows past an expert's last are of the next expert or stale; their results are not stored.
//  - With silu_mul one warpgroup of a CTA has rows of gate, the other the same rows of up, whose sums it sends to the
//    first through shared memory, in float32.
//  - Warpgroups that split K send their sums to the first one, which adds them in the order of slices.
#pragma once
#include "linear/frag16_sm90/gemm_ws.cuh"
#include "grouped_tiles.cuh"

#ifdef __CUDACC__

namespace gm {

// W: the kind of weight, a class of decoders_wgmma.cuh.  MT, C, SLICES, CTAS: see GroupedCta.  XS, WS,
// CHAINS, PENDING: as for linear_gemm_ws.
template <typename W, int MT, int C, int SLICES, int CTAS, int XS, int WS, int CHAINS, int PENDING>
__device__ __forceinline__ void grouped_linear_ws(const GroupedParams& p, const CUtensorMap& x_map) {
  using T = typename W::Type;
  using Shape = GroupedCta<MT, C, SLICES, CTAS>;
  static_assert(XS % (2 * SLICES) == 0 && WS % SLICES == 0 ||
                SLICES == 1);  // a slice always has the same slots
  static_assert(WS < kTilesAhead);
  constexpr int kTile = W::kBytes, kXSlot = MT * kXSlotK * 2, kWSlot = C * 4 * kTile;
  constexpr int kChunk = Shape::kChunk, kFirstSender = SLICES * C - Shape::kSenders;
  extern __shared__ __align__(1024) uint8_t smem[];
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  const uint32_t base = smem_u32_once(smem);
  constexpr int kWRing = XS * kXSlot, kExchangeAt = kWRing + WS * kWSlot,
                kStaging = kExchangeAt + Shape::kExchange, kBars = kStaging + Shape::kStaging,
                kExchangeFull = kBars + (XS + WS) * 16, kExchangeEmpty = kExchangeFull + C * 32,
                kTiles = kExchangeEmpty + C * 32, kList = kTiles + kTilesAhead * 16;
  using XRing = Ring<XS, kXSlot, 0, kBars>;
  using WRing = Ring<WS, kWSlot, kWRing, kBars + XS * 16>;
  const bool gather = p.permutation != nullptr;
  const GroupedList list{reinterpret_cast<int*>(smem + kList),
                         reinterpret_cast<int*>(smem + kList) + p.experts + 1};
  if (threadIdx.x == 0) {
    const XRing x(base);
    const WRing w(base);
    for (int i = 0; i < XS; ++i)
      mbar_init(x.full + i * 8, gather ? kGatherWarps * 32 : 1),
          mbar_init(x.empty() + i * 8, C * 4 * kArrivingLanes);
    for (int i = 0; i < WS; ++i)
      mbar_init(w.full + i * 8, 1), mbar_init(w.empty() + i * 8, C * 4 * kArrivingLanes);
    for (int i = 0; i < C * 4; ++i)
      mbar_init(base + kExchangeFull + i * 8, p.gated ? C * SLICES - 1 : max(1, SLICES - 1)),
          mbar_init(base + kExchangeEmpty + i * 8, 1);
    fence_mbarrier_init();
  }
  if (!p.early) griddepcontrol_wait();
  list.build<MT>(p);
  // After the wait, so that the next kernel may also read what the kernel before this one waited for.
  griddepcontrol_launch_dependents();
  const int tiles = list.first[p.experts] * p.blocks;
  constexpr int kWarps = C * SLICES * 4;
  const int rounds = SLICES == 1 ? p.groups : (p.groups + SLICES - 1) / SLICES * SLICES;

  if (warp >= kWarps) {
    setmaxnreg_dec<Shape::kProducerRegisters>();
    const int role = warp - kWarps;
    if (role == kGatherWarps) {  // weights are constant: no griddepcontrol.wait
      WRing w(base);
      int count = 0;
      const int64_t block_bytes = static_cast<int64_t>(p.groups) * (4 * kTile);
#pragma unroll 1
      for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
        const GroupedTile tile = grouped_tile<MT>(p, list, index);
        // For the consumers, which see it once the tile's first slot is full. They are at most WS tiles
        // behind.
        if (lane == 0)
          *reinterpret_cast<int4*>(smem + kTiles + (count++ % kTilesAhead) * 16) =
              make_int4(tile.expert, tile.block, tile.row, tile.end);
        const uint64_t policy = tile.m_tiles > 1 ? l2_evict_normal() : l2_evict_first();
        // A lane copies a block of four tiles of 16 rows, or, where some block is not whole, one such tile.
        const int half = p.tiles16 >> 1;
        const auto begin_of = [&](int b) {
          return p.gated ? tile.block * 4 + (b > 0 ? half : 0) : (tile.block * C + b) * 4;
        };
        bool whole = true;
#pragma unroll
        for (int b = 0; b < C; ++b)
          whole &= begin_of(b) % 4 == 0 && begin_of(b) + 4 <= (p.gated && b == 0 ? half : p.tiles16);
        const int b = whole ? lane : lane >> 2, tile16 = begin_of(b) + (whole ? 0 : lane & 3);
        const int there = min(4, p.tiles16 - (tile16 & ~3));  // tiles of the block of 64 rows in memory
        const uint32_t bytes = b >= C || tile16 >= (p.gated && b == 0 ? half : p.tiles16) ? 0
                               : whole                                                    ? 4 * kTile
                                                                                          : kTile;
        const uint32_t all = __reduce_add_sync(0xffffffffu, bytes), to = lane * (whole ? 4 * kTile : kTile);
        const uint8_t* from = p.w + tile.expert * p.expert_bytes + (tile16 >> 2) * block_bytes +
                              (whole ? 0 : (tile16 & 3) * kTile);
#pragma unroll 1
        for (int k = 0; k < p.groups; ++k, from += there * kTile) {
          mbar_wait(w.empty(), w.parity ^ 1);
          if (lane == 0) mbar_arrive_expect_tx(w.full, all);
          if (bytes > 0) bulk_load(w.slot + to, from, bytes, w.full, policy);
          w.next(base);
        }
#pragma unroll 1
        for (int k = p.groups; k < rounds; ++k) {  // padding, for slices that have one group fewer
          mbar_wait(w.empty(), w.parity ^ 1);
          if (lane == 0) mbar_arrive(w.full);
          w.next(base);
        }
      }
    } else if (role < kGatherWarps) {
      griddepcontrol_wait();
      XRing x(base);
      const int last = gather ? 0 : role;
#pragma unroll 1
      for (int index = blockIdx.x; index < tiles && last == 0; index += gridDim.x) {
        const GroupedTile tile = grouped_tile<MT>(p, list, index);
        if (gather) {
          // A warp copies four rows at a time, eight lanes each; the two warps alternate.
          constexpr int kSteps = MT / 4 / kGatherWarps;
          const int row = role * 4 + (lane >> 3), chunk = lane & 7, count = tile.end - tile.row;
          const uint8_t* from = static_cast<const uint8_t*>(p.x) + chunk * 16;
          const uint32_t to = row * 128 + ((chunk ^ (row & 7)) << 4);
          const int* entries = p.permutation + tile.row + row;
          uint32_t source[kSteps];  // in 16-byte chunks
#pragma unroll
          for (int i = 0; i < kSteps; ++i) source[i] = row + i * 8 < count ? __ldcg(entries + i * 8) : 0;
#pragma unroll
          for (int i = 0; i < kSteps; ++i) source[i] = quotient(source[i], p.top_k, p.by_top_k) * p.x_chunks;
          const auto copy_slot = [&](auto copy) {
            mbar_wait(x.empty(), x.parity ^ 1);
#pragma unroll
            for (int i = 0; i < kSteps; ++i)
              if (row + i * 8 < count)
                copy(x.slot + to + i * 1024, from + static_cast<uint64_t>(source[i]) * 16);
            cp_async_mbar_arrive(x.full);
            x.next(base);
            from += kXSlotK * 2;
          };
          int h = 0;
#pragma unroll 1
          for (; h < p.k / kXSlotK; ++h)
            copy_slot([](uint32_t dst, const void* src) { cp_async_16<128>(dst, src); });
          int left = p.k % kXSlotK - chunk * 8;
#pragma unroll 1
          for (; h < p.groups * 2; ++h, left -= kXSlotK)  // the end of the rows, padded with zeros
            copy_slot([&](uint32_t dst, const void* src) { cp_async_16_or_zeros<128>(dst, src, left > 0); });
        } else if (lane == 0) {
#pragma unroll 1
          for (int k = 0; k < p.groups * 128; k += kXSlotK) {
            mbar_wait(x.empty(), x.parity ^ 1);
            mbar_arrive_expect_tx(x.full, kXSlot);
            tma_load(x.slot, &x_map, k, tile.row, x.full);
            x.next(base);
          }
        }
        __syncwarp();
        if (gather || lane == 0)
#pragma unroll 1
          for (int h = p.groups * 2; h < rounds * 2; ++h) {
            mbar_wait(x.empty(), x.parity ^ 1);
            mbar_arrive(x.full);
            x.next(base);
          }
        __syncwarp();
      }
    } else if (p.clear) {
      griddepcontrol_wait();
      for (int64_t row = list.starts[p.experts] + blockIdx.x; row < p.rows; row += gridDim.x)
        for (int n = lane; n < p.out_n; n += 32) static_cast<T*>(p.y)[row * p.out_n + n] = Num<T>::round(0.f);
    }
  } else {
    setmaxnreg_inc<Shape::kConsumerRegisters>();
    const int group = warp >> 2, slice = group / C, c = group % C, quarter = warp & 3;
    const int owner = p.gated ? 0 : c;  // the block whose warpgroup of slice 0 receives the sums
    const bool owns = group == owner;
    const int senders = p.gated ? C * SLICES - 1 : SLICES - 1;
    const uint32_t exchange_full = base + kExchangeFull + (owner * 4 + quarter) * 8,
                   exchange_empty = base + kExchangeEmpty + (owner * 4 + quarter) * 8;
    // Buffer for the sums that warpgroup `from` sends, in accumulator layout.
    const auto exchange_buffer = [&](int from) {
      return base + kExchangeAt + (from - kFirstSender) * Shape::kExchangeBytes + (threadIdx.x & 127) * 16;
    };
    uint32_t phase = 0;  // parity of the exchange
    int count = 0;       // of tiles
    XRing x(base, slice * 2);
    WRing w(base, slice);
    const uint32_t my_tile = (c * 4 + quarter) * kTile,
                   staging = base + kStaging + (c * 4 + quarter) * (512 * Shape::kPairs);
    griddepcontrol_wait();
    const auto release = [&](uint32_t slot) {
      if (lane < kArrivingLanes) mbar_arrive(slot);
    };
#pragma unroll 1
    for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
      const int mine = SLICES == 1 ? p.groups : (p.groups + SLICES - 1 - slice) / SLICES;
      float acc[CHAINS][MT / 2];
      uint32_t a[PENDING + 1][4];
      typename W::Part part[2];
      W weights;
      mbar_wait(w.full, w.parity);
      part[0].load(w.slot + my_tile, lane, 0);
      const int4 at = *reinterpret_cast<const int4*>(smem + kTiles + (count++ % kTilesAhead) * 16);
      const GroupedTile tile{at.x, at.y, at.z, at.w, 0};
      const int n0 = ((p.gated ? tile.block : tile.block * C + c) * 4 + quarter) * kTileRows;
      float by[2] = {W::kFactor, W::kFactor}, by_up[2] = {W::kFactor, W::kFactor};
      if (owns && p.row_scale != nullptr) {
        const float* scales = p.row_scale + static_cast<int64_t>(tile.expert) * p.n;
        const int row = n0 + (lane >> 2);
        if (row < p.out_n) by[0] = scales[row], by_up[0] = p.gated ? scales[row + p.out_n] : 0.f;
        if (row + 8 < p.out_n) by[1] = scales[row + 8], by_up[1] = p.gated ? scales[row + 8 + p.out_n] : 0.f;
      }
      const uint32_t last_x = multiply_groups<W, MT, SLICES, CHAINS, PENDING>(
          acc, a, weights, part, x, w, base, my_tile, mine, p.scales_half, release, [&] {
            if (gather) fence_proxy_async();
          });
      wgmma_wait<0>();
      release(last_x);
      // Padding: this slice has one group fewer.
      if (SLICES > 1 && rounds != p.groups && (rounds - p.groups) >= SLICES - slice) {
        mbar_wait(w.full, w.parity);
        release(w.empty());
        w.template next<SLICES>(base);
        mbar_wait(x.full, x.parity);
        release(x.empty());
        x.next(base);
        mbar_wait(x.full, x.parity);
        release(x.empty());
        x.template next<2 * SLICES - 1>(base);
      }
      if constexpr (CHAINS == 2) {
#pragma unroll
        for (int i = 0; i < MT / 2; ++i) acc[0][i] += acc[1][i];
      }
      float (&sum)[MT / 2] = acc[0];
#pragma unroll
      for (int first = 0; first < Shape::kFragments; first += kChunk) {
        if (!owns) {
          mbar_wait(exchange_empty, phase ^ 1);
#pragma unroll
          for (int f = 0; f < kChunk; ++f)
            st_shared(exchange_buffer(group) + f * 2048,
                      make_float4(sum[(first + f) * 4], sum[(first + f) * 4 + 1], sum[(first + f) * 4 + 2],
                                  sum[(first + f) * 4 + 3]));
          __syncwarp();
          if (lane == 0) mbar_arrive(exchange_full);
          phase ^= 1;
          continue;
        }
        float v[Shape::kPairs * 8] = {};
#pragma unroll
        for (int i = 0; i < kChunk * 4; ++i) v[i] = sum[first * 4 + i];
        float up[kChunk * 4] = {};
        if (senders > 0) {
          mbar_wait(exchange_full, phase);
          // Adds the sums that warpgroup `from` sent to those at `to`.
          const auto add_received = [&](int from, float* to) {
#pragma unroll
            for (int f = 0; f < kChunk; ++f) {
              float g[4];
              ld_shared(g, exchange_buffer(from) + f * 2048);
#pragma unroll
              for (int i = 0; i < 4; ++i) to[f * 4 + i] += g[i];
            }
          };
#pragma unroll
          for (int s = 1; s < SLICES; ++s) add_received(s * C + c, v);
          if (C == 2 && p.gated) {
#pragma unroll
            for (int s = 0; s < SLICES; ++s) add_received(s * C + 1, up);
          }
          __syncwarp();
          if (lane == 0) mbar_arrive(exchange_empty);
          phase ^= 1;
        }
        float factor[2] = {by[0], by[1]};
        if (C == 2 && p.gated) {
#pragma unroll
          for (int i = 0; i < kChunk * 4; ++i) {
            const float gate = v[i] * by[i >> 1 & 1];
            v[i] = __fdividef(gate, 1.f + __expf(-gate)) * (up[i] * by_up[i >> 1 & 1]);
          }
          factor[0] = factor[1] = 1.f;
        }
        const float no_bias[2] = {0.f, 0.f};
        GemmParams out;
        out.y = p.y, out.n = p.out_n, out.residual = nullptr, out.vector = p.vector;
        const int m0 = tile.row + first * 8;
        store_fragments<T, Shape::kPairs>(out, v, factor, no_bias, staging, n0, m0,
                                          min(tile.end, m0 + kChunk * 8));
      }
    }
  }
}

}  // namespace gm
#endif
