// Schedule decode_ws: decode.cuh warp-specialised. There, warps spend a quarter of their instructions on copies at
// M = 16. Here one warpgroup copies and the others multiply, with the registers that it releases (setmaxnreg):
//  - One ring of slots per CTA. A slot holds 128 k of all its rows of W (bulk copies, one lane per block of
//    64 rows) and of x (TMA, in the 128-byte swizzle).
//  - WK slices of WN warps alternate slots. The number of slots is a multiple of WK, so that a slice always has the
//    same slots and tracks their phase by a parity.
//  - Weights do not depend on the previous kernel: their copies are issued before griddepcontrol.wait.
// Sums are reduced as in decode.cuh, in a fixed order.
#pragma once
#include "decode_common.cuh"

#ifdef __CUDACC__
#include <cuda.h>

namespace gm {

// W: the kind of weight, a class of decoders_mma.cuh.  NT: columns of x in eights.  RT: tiles of 16
// rows per warp.  WN x WK: warps along N and along K.
template <typename T, typename W, int NT, int RT, int WN, int WK>
__device__ __forceinline__ void linear_decode_ws(const DecodeParams& p, const CUtensorMap& x_map) {
  constexpr int kWarps = WN * WK, kTile = W::kBytes, kTiles = WN * RT, kSlot = kTiles * kTile,
                kXSlot = NT * 8 * kTileK * 2;
  static_assert(kWarps % 4 == 0, "setmaxnreg applies to whole warpgroups");
  // Registers per thread: at launch, of the producer, of the consumers.
  constexpr int kThreads = kWarps * 32 + 128, kLaunched = 65536 / kThreads / 8 * 8, kProducerRegisters = 32;
  constexpr int kPerConsumer = (kLaunched * kThreads - 128 * kProducerRegisters) / (kWarps * 32) / 8 * 8,
                kConsumerRegisters = kPerConsumer > 232 ? 232 : kPerConsumer;
  extern __shared__ __align__(1024) uint8_t smem[];
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, depth = p.depth;
  const int split = 1 << p.log_split, rank = blockIdx.x & (split - 1), block = blockIdx.x >> p.log_split;
  const int kb0 = (p.groups * rank) >> p.log_split, kb1 = (p.groups * (rank + 1)) >> p.log_split;
  const uint32_t x_ring = smem_u32(smem), w_ring = x_ring + depth * kXSlot, full = x_ring + p.bars,
                 empty = full + kMaxDepth * 8;
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int i = 0; i < depth; ++i) mbar_init(full + i * 8, 2), mbar_init(empty + i * 8, WN * kArrivingLanes);
    fence_mbarrier_init();
  }
  __syncthreads();
  griddepcontrol_launch_dependents();

  if (warp >= kWarps) {
    setmaxnreg_dec<kProducerRegisters>();
    int at = 0;
    // All slots are empty at first: a wait for the phase before the first one succeeds.
    uint32_t parity = 1;
    const auto next = [&] {
      if (++at == depth) at = 0, parity ^= 1;
    };
    if (warp == kWarps && lane == 0) {
      prefetch_tensormap(&x_map);
      griddepcontrol_wait();
#pragma unroll 1
      for (int group = kb0; group < kb1; ++group, next()) {
        const uint32_t to = x_ring + at * kXSlot, bar = full + at * 8;
        mbar_wait(empty + at * 8, parity);
        mbar_arrive_expect_tx(bar, kXSlot);
        tma_load(to, &x_map, group * kTileK, 0, bar);
        tma_load(to + kXSlot / 2, &x_map, group * kTileK + kTileK / 2, 0, bar);
      }
    } else if (warp == kWarps + 1) {
      const int first = block * kTiles, last = min(first + kTiles, p.tiles), base = (first & ~3) + lane * 4;
      const int from = max(first, base), in_block = min(4, p.tiles - base);
      // Rows past the end: nothing to copy, their sums are never stored.
      const int bytes = max(0, min(last, base + 4) - from) * kTile;
      const char* src = reinterpret_cast<const char*>(p.w) +
                        (static_cast<int64_t>(base) * p.groups + kb0 * in_block + (from - base)) * kTile;
      const uint32_t to = w_ring + (from - first) * kTile;
      const uint64_t policy = l2_evict_first();
#pragma unroll 1
      for (int group = kb0; group < kb1; ++group, next()) {
        const uint32_t bar = full + at * 8;
        mbar_wait(empty + at * 8, parity);
        if (lane == 0) mbar_arrive_expect_tx(bar, (last - first) * kTile);
        __syncwarp();
        if (bytes > 0) bulk_load(to + at * kSlot, src, bytes, bar, policy);
        src += in_block * kTile;
      }
    }
    __syncwarp();
    __syncthreads();  // the barriers of the epilogue, in which all threads of the CTA take part
    if (split > 1) cluster_arrive();
    __syncthreads();
    if (split > 1) {
      cluster_wait();
      cluster_sync();
    }
    return;
  }

  setmaxnreg_inc<kConsumerRegisters>();
  const int wn = warp % WN, wk = warp / WN;
  // Prefetches what the epilogue reads.
  if (p.row_scale != nullptr && threadIdx.x * 32 < kTiles * kTileRows) {
    const int row = block * kTiles * kTileRows + threadIdx.x * 32;
    if (row < p.n) prefetch_l2(p.row_scale + row);
  }
  griddepcontrol_wait();
  float acc[RT][NT][4];
#pragma unroll
  for (int r = 0; r < RT; ++r)
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[r][n][i] = 0.f;
  // Swizzled offsets of the lane's row of the B fragments; rows past M are zeros and never stored.
  uint32_t swizzle[NT];
#pragma unroll
  for (int n = 0; n < NT; ++n) swizzle[n] = ((lane >> 3) ^ (lane & 7)) * 16;
  int at = wk;
  uint32_t parity = 0;
  const uint32_t zero = opaque_zero();
#pragma unroll 1
  for (int group = kb0 + wk; group < kb1; group += WK) {
    mbar_wait(full + at * 8, parity);
    uint4 x[NT][4];
    uint32_t rows[NT];
#pragma unroll
    for (int n = 0; n < NT; ++n) rows[n] = x_ring + at * kXSlot + (n * 8 + (lane & 7)) * 128;
    load_x(x, rows, swizzle, kXSlot / 2);
    uint32_t any = multiply_tiles<T, W, NT, RT>(acc, smem + depth * kXSlot + at * kSlot + wn * RT * kTile, x,
                                                lane, p.scales_half);
#pragma unroll
    for (int n = 0; n < NT; ++n) any |= x[n][0].x | x[n][1].x | x[n][2].x | x[n][3].x;
    __syncwarp();
    if ((lane | (any & zero)) < kArrivingLanes) mbar_arrive(empty + at * 8);
    if ((at += WK) >= depth) at -= depth, parity ^= 1;
  }

  // The rings are drained: their memory is reused for the partial sums of the warps and of the cluster's other CTAs.
  __syncthreads();
  if (split > 1) cluster_arrive();
  store_partials<W>(acc, smem, wk * WN + wn, lane);
  reduce_and_store<T, NT, kTiles, WK, kWarps * 32>(p, smem, block * kTiles, rank);
}

}  // namespace gm
#endif
