// Weight-only 4-bit linear for Hopper, small M: y[M,N] = x[M,K] · W[N,K]ᵀ, float32 accumulation.
//
// How it works, and why:
//  - W is the A operand of mma.m16n8k16 and x the B operand, so that the 16-wide side is N and the 8-wide side is M: at M = 1
//    seven eighths of the products are wasted, but the tensor core is idle anyway and the float units do not become the limit.
//  - The weights lie in memory in fragment order (layout w4_frag16_v1: tiles of 16 rows x 128 k, 1024 bytes of codes and then
//    32 bytes of scales). A tile is one bulk copy from global to shared memory, and each lane gets its codes by two 16-byte loads.
//  - Every warp owns a slice of K and a private ring of tiles in shared memory, fills it itself and empties it itself: no barrier
//    between warps until the end. One hundred kilobytes a CTA are in flight.
//  - Two codes become exact 16-bit floats, less their zero point, by one logic operation and one multiply-add (_weight_tiles_sm90.cuh);
//    scales multiply the float32 accumulator once per group.
//  - Partial sums of the warps meet in shared memory, those of a cluster's CTAs (split-K) in the owner's shared memory, in a fixed
//    order: the result is bitwise reproducible.
//  - Weights are immutable, so their copies start before griddepcontrol.wait; x is read after it.
#pragma once
#include "_weight_tiles_sm90.cuh"

#ifdef __CUDACC__
namespace gm {

// Adds the finished sums of a group (G = 0: of the tile) to the accumulators, scaled.
template <typename W, int CH, int NT>
__device__ __forceinline__ void add_sums(float (&acc)[NT][4], const float (&part)[CH][NT][4], const W& w, int group, const W4Params& p) {
  float s[2] = {1.f, 1.f};
  if constexpr (W::kGroups > 0) {
    const float2 both = w.scale(group, p);
    s[0] = both.x, s[1] = both.y;
  }
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float sum = CH == 2 ? part[0][n][i] + part[CH - 1][n][i] : part[0][n][i];
      acc[n][i] = W::kGroups > 0 ? acc[n][i] + s[i >> 1] * sum : sum;
    }
}

// W: the kind of weight, a class of _weight_tiles_sm90.cuh.  NT: columns of x in eights.  RT: tiles of 16 rows per warp.  C: tiles of
// a slot.  WN x WK: warps along N and along K.  NX: slots of x.
template <typename T, typename W, int NT, int RT, int C, int WN, int WK, int NX>
__device__ __forceinline__ void linear_frag16(const W4Params& p) {
  constexpr int kWarps = WN * WK, kSub = (RT + C - 1) / C, kTile = W::kBytes, kSlot = C * kTile, G = W::kGroups;
  // Tiles at a time (fp4 is 1 to 2 % faster with two, the others need fewer registers with one); chains of products a tile; steps a group.
  constexpr int TP = G == 0 ? 2 : 1, CH = NT == 1 && G <= 1 ? 2 : 1, kEvery = G > 1 ? 8 / G : 8;
  extern __shared__ __align__(128) uint8_t smem[];
  __shared__ __align__(8) uint64_t bars[kWarps][kMaxDepth];
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  const int wn = warp % WN, wk = warp / WN, depth = p.depth;
  const int split = 1 << p.log_split, rank = blockIdx.x & (split - 1), block = blockIdx.x >> p.log_split;
  const int kb0 = (p.groups * rank) >> p.log_split, kb1 = (p.groups * (rank + 1)) >> p.log_split;
  const int steps = max(0, (kb1 - kb0 - wk + WK - 1) / WK), chunks = steps * kSub;
  const int xslot = p.m * kTileK * 2;
  uint8_t* ring = smem + warp * depth * kSlot;
  uint8_t* xs = smem + kWarps * depth * kSlot + wk * NX * xslot;
  const uint32_t bar0 = smem_u32(&bars[warp][0]);

  // The warp's part of the weights: a group fills kSub slots of C tiles, each from up to kSeg blocks of 64 rows.
  constexpr int kSeg = 4 % C == 0 && RT % C == 0 ? 1 : 3;
  const char* src[kSub * kSeg];
  int bytes[kSub * kSeg], stride[kSub * kSeg];
  uint64_t policy = 0;
  if (lane == 0) {
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#pragma unroll
    for (int i = 0; i < kSub * kSeg; ++i) {
      const int row0 = (block * WN + wn) * RT, first = row0 + i / kSeg * C, last = min(min(first + C, row0 + RT), p.tiles);
      const int base = (first & ~3) + i % kSeg * 4, from = max(first, base), till = min(last, base + 4), in_block = min(4, p.tiles - base);
      bytes[i] = max(0, till - from) * kTile;  // rows past the end: nothing to copy, their sums are never stored
      stride[i] = WK * in_block * kTile;
      src[i] = reinterpret_cast<const char*>(p.w) + (static_cast<int64_t>(base) * p.groups + (kb0 + wk) * in_block + (from - base)) * kTile;
    }
  }
  const auto issue = [&](int slot, int sub) {  // lane 0 only
    const uint32_t bar = bar0 + 8 * slot;
    uint32_t dst = smem_u32(ring) + slot * kSlot, total = 0;
#pragma unroll
    for (int j = 0; j < kSeg; ++j) total += bytes[sub * kSeg + j];
    mbar_expect(bar, total);
#pragma unroll
    for (int j = 0; j < kSeg; ++j) {
      const int i = sub * kSeg + j;
      if (bytes[i] > 0) bulk_load(dst, src[i], bytes[i], bar, policy);
      dst += bytes[i], src[i] += stride[i];
    }
  };
  if (lane == 0) {
#pragma unroll 1
    for (int s = 0; s < depth; ++s) mbar_init(bar0 + 8 * s, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#pragma unroll 1
    for (int s = 0; s < depth && s < chunks; s += kSub)
#pragma unroll
      for (int i = 0; i < kSub; ++i) issue(s + i, i);
  }
  if (p.row_scale != nullptr && threadIdx.x * 32 < RT * WN * kTileRows) {  // the kernel's last read, fetched with its first
    const int row = block * RT * WN * kTileRows + threadIdx.x * 32;
    if (row < p.n) asm volatile("prefetch.global.L2 [%0];" ::"l"(p.row_scale + row));
  }
  __syncwarp();
  if (split > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");

  XLoader<T, NT, WN> loader(p, smem_u32(xs), p.m, (kb0 + wk) * kTileK, wn * 32 + lane);
#pragma unroll
  for (int i = 0; i < NX - 1; ++i) {
    if (i < steps) loader.load(p, i * xslot, WK);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  // Where the lane's row of the B fragments lies; columns past M repeat the last one and are never stored.
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
    asm volatile("cp.async.wait_group %0;" ::"n"(NX - 2) : "memory");
    if constexpr (WN == 1)
      __syncwarp();
    else
      asm volatile("bar.sync %0, %1;" ::"r"(wk + 1), "n"(WN * 32) : "memory");
    // Everyone has this step's x, and nobody reads the previous one's any more.
    if (step + NX - 1 < steps) loader.load(p, xfree, WK);
    asm volatile("cp.async.commit_group;" ::: "memory");
    uint4 x[NT][4];
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t at = xrow[n] + xi + (j >> 1) * (xslot / 2) + (xswz[n] ^ (j & 1) * 64);
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(x[n][j].x), "=r"(x[n][j].y), "=r"(x[n][j].z), "=r"(x[n][j].w)
                     : "r"(at)
                     : "memory");
      }
    xfree = xi;
    if ((xi += xslot) == NX * xslot) xi = 0;

#pragma unroll
    for (int sub = 0; sub < kSub; ++sub) {
      mbar_wait(bar0 + 8 * slot, parity);
      const uint8_t* chunk = ring + slot * kSlot;
#pragma unroll
      for (int c0 = 0; c0 < C && sub * C + c0 < RT; c0 += TP) {
        const int tiles = min(min(C - c0, RT - sub * C - c0), TP);
        float(*to)[NT][4] = acc + sub * C + c0;
        W w[TP];
        float part[TP][CH][NT][4];
#pragma unroll
        for (int c = 0; c < tiles; ++c) w[c].load(chunk + (c0 + c) * kTile, lane);
#pragma unroll
        for (int step = 0; step < 8; ++step) {
#pragma unroll
          for (int c = 0; c < tiles; ++c) {
            if (step % kEvery == 0) {  // sums start anew
#pragma unroll
              for (int h = 0; h < CH; ++h)
#pragma unroll
                for (int n = 0; n < NT; ++n)
#pragma unroll
                  for (int i = 0; i < 4; ++i) part[c][h][n][i] = G == 0 && h == 0 ? to[c][n][i] : 0.f;
            }
            uint32_t a[4];
            w[c].pairs(step, a);
#pragma unroll
            for (int n = 0; n < NT; ++n) {
              const uint4& b = x[n][step >> 1];
              float(&sum)[4] = part[c][step % CH][n];
              Num<T>::mma(sum, a, step & 1 ? b.z : b.x, step & 1 ? b.w : b.y, sum);
            }
            if (step % kEvery == kEvery - 1) add_sums<W, CH>(to[c], part[c], w[c], step / kEvery, p);
          }
        }
      }
      __syncwarp();  // every lane has read the slot
      if (lane == 0 && next < chunks) issue(slot, sub);
      ++next;
      if (++slot == depth) slot = 0, parity ^= 1;
    }
  }

  __syncthreads();  // the rings are drained; their memory now takes the warps' sums
  float4* scratch = reinterpret_cast<float4*>(smem);
#pragma unroll
  for (int r = 0; r < RT; ++r)
#pragma unroll
    for (int n = 0; n < NT; ++n)
      scratch[((wk * WN + wn) * RT * NT + r * NT + n) * 32 + lane] = make_float4(acc[r][n][0] * W::kFactor, acc[r][n][1] * W::kFactor,
                                                                                 acc[r][n][2] * W::kFactor, acc[r][n][3] * W::kFactor);
  finish_sums<T, NT, WN * RT, WK, kWarps * 32>(p, smem, block * WN * RT, rank);
}

}  // namespace gm
#endif
