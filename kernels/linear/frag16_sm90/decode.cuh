// Schedule decode: y[M, N] = x[M, K] · W[N, K]^T at M <= 16, float32 accumulation; warps copy for themselves.
//
//  - W is the A operand of mma.m16n8k16, x the B operand (decode_common.cuh).
//  - Weights lie in memory in fragment order (quant/layouts/w4_frag16_v1.py). Up to four tiles are one bulk
//    copy from global to shared memory, and each lane gets a tile's codes by two 16-byte loads.
//  - Each warp has a slice of K and a private ring of tiles in shared memory, of which it is producer and consumer: no
//    barrier between warps until the end. 100 KB per CTA are in flight.
//  - Two codes are converted to 16-bit floats exactly, and their zero point subtracted, by one logic operation and one
//    multiply-add (decoders_mma.cuh); scales multiply the float32 accumulator once per group.
//  - Partial sums of the warps are reduced in shared memory, those of a cluster's CTAs (split-K) in distributed shared
//    memory, in a fixed order: the result is bitwise reproducible.
//  - Weights are immutable, so their copies start before griddepcontrol.wait; x is read after it.
// Compared with decode_ws.cuh, where other warps copy, the prologue costs less and each step along K more.
#pragma once
#include "decode_common.cuh"

#ifdef __CUDACC__
namespace gm {

// CTAs per multiprocessor for __launch_bounds__: one fewer where a tile needs so many registers that `ctas` do not
// fit.
template <typename W, int NT>
constexpr int ctas_per_sm(int ctas) {
  return NT > 1 && ctas > 1 && (W::kGroups > 1 || W::kZero || W::kBytes > 2000) ? ctas - 1 : ctas;
}

// W: the kind of weight, a class of decoders_mma.cuh.  NT: columns of x in eights.  RT: tiles of 16
// rows per warp.  C: tiles of a slot.  WK: warps, each along K.  NX: slots of x.
template <typename T, typename W, int NT, int RT, int C, int WK, int NX>
__device__ __forceinline__ void linear_decode(const DecodeParams& p) {
  static_assert(RT % C == 0 && 4 % C == 0, "a slot is one copy");
  constexpr int kSub = RT / C, kTile = W::kBytes, kSlot = C * kTile;
  extern __shared__ __align__(1024) uint8_t smem[];
  __shared__ __align__(8) uint64_t bars[WK][kMaxDepth];
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, depth = p.depth;
  const int split = 1 << p.log_split, rank = blockIdx.x & (split - 1), block = blockIdx.x >> p.log_split;
  const int kb0 = (p.groups * rank) >> p.log_split, kb1 = (p.groups * (rank + 1)) >> p.log_split;
  const int steps = max(0, (kb1 - kb0 - warp + WK - 1) / WK), chunks = steps * kSub;
  const int xslot = p.m * kTileK * 2;
  uint8_t* ring = smem + warp * depth * kSlot;
  uint8_t* xs = smem + WK * depth * kSlot + warp * NX * xslot;
  const uint32_t bar0 = smem_u32(&bars[warp][0]);

  // The warp's weights: a group of 128 k is kSub slots of C tiles.
  const char* src[kSub];
  int bytes[kSub], stride[kSub];
  uint64_t policy = 0;
  if (lane == 0) {
    policy = l2_evict_first();
#pragma unroll
    for (int i = 0; i < kSub; ++i) {
      const int first = block * RT + i * C, base = first & ~3, in_block = min(4, p.tiles - base);
      // Rows past the end: nothing to copy, their sums are never stored.
      bytes[i] = max(0, min(C, p.tiles - first)) * kTile;
      stride[i] = WK * in_block * kTile;
      src[i] = reinterpret_cast<const char*>(p.w) +
               (static_cast<int64_t>(base) * p.groups + (kb0 + warp) * in_block + (first - base)) * kTile;
    }
  }
  const auto issue = [&](int slot, int sub) {  // lane 0 only
    const uint32_t bar = bar0 + 8 * slot;
    mbar_arrive_expect_tx(bar, bytes[sub]);
    if (bytes[sub] > 0) bulk_load(smem_u32(ring) + slot * kSlot, src[sub], bytes[sub], bar, policy);
    src[sub] += stride[sub];
  };
  if (lane == 0) {
#pragma unroll 1
    for (int s = 0; s < depth; ++s) mbar_init(bar0 + 8 * s, 1);
    fence_mbarrier_init();
#pragma unroll 1
    for (int s = 0; s < depth && s < chunks; s += kSub)
#pragma unroll
      for (int i = 0; i < kSub; ++i) issue(s + i, i);
  }
  // Prefetches what the epilogue reads.
  if (p.row_scale != nullptr && threadIdx.x * 32 < RT * kTileRows) {
    const int row = block * RT * kTileRows + threadIdx.x * 32;
    if (row < p.n) prefetch_l2(p.row_scale + row);
  }
  __syncwarp();
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();

  XLoader<T, NT> loader(p, smem_u32(xs), (kb0 + warp) * kTileK, lane);
#pragma unroll
  for (int i = 0; i < NX - 1; ++i) {
    if (i < steps) loader.load(p, i * xslot, WK);
    cp_async_commit();
  }
  // Swizzled offsets of the lane's row of the B fragments; columns past M repeat the last one and are never
  // stored.
  uint32_t xrow[NT], xswz[NT];
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    const int row = min(n * 8 + (lane & 7), p.m - 1);
    xrow[n] = smem_u32(xs) + row * 128, xswz[n] = ((lane >> 3) ^ (row & 7)) * 16;
  }

  float acc[RT][NT][4];
#pragma unroll
  for (int r = 0; r < RT; ++r)
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[r][n][i] = 0.f;

  int slot = 0, next = depth, xi = 0, xfree = (NX - 1) * xslot;  // slots of x as byte offsets
  uint32_t parity = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    cp_async_wait<NX - 2>();
    __syncwarp();
    // Every lane's part of this step's x has landed, and the previous step's has been read.
    if (step + NX - 1 < steps) loader.load(p, xfree, WK);
    cp_async_commit();
    uint4 x[NT][4];
    uint32_t rows[NT];
#pragma unroll
    for (int n = 0; n < NT; ++n) rows[n] = xrow[n] + xi;
    load_x(x, rows, xswz, xslot / 2);
    xfree = xi;
    if ((xi += xslot) == NX * xslot) xi = 0;

#pragma unroll
    for (int sub = 0; sub < kSub; ++sub) {
      mbar_wait(bar0 + 8 * slot, parity);
      multiply_tiles<T, W, NT, C>(acc + sub * C, ring + slot * kSlot, x, lane, p.scales_half);
      __syncwarp();  // every lane has read the slot
      if (lane == 0 && next < chunks) issue(slot, sub);
      ++next;
      if (++slot == depth) slot = 0, parity ^= 1;
    }
  }

  // The rings are drained: their memory is reused for the partial sums of the warps and of the cluster's other CTAs.
  __syncthreads();
  if (split > 1) cluster_arrive();
  store_partials<W>(acc, smem, warp, lane);
  reduce_and_store<T, NT, RT, WK, WK * 32>(p, smem, block * RT, rank);
}

}  // namespace gm
#endif
