// Weight-only 4-bit linear for Hopper with warpgroup products: more rows of x than one mma.m16n8k16 covers.
//
// As in _linear_w4a16_sm90.cuh, with these differences, each for a measured reason:
//  - Decoded weights are the register operand of wgmma and x is its shared-memory operand: a group's 16 k of all rows of x are one
//    instruction instead of M / 8, no registers hold x, and the tensor cores run while the warps decode the next block.
//  - The offset of the decoded codes is subtracted from the packed pairs (exactly; on the float unit, which is idle) instead of going
//    through the accumulator: with many columns that is cheaper.
//  - A warpgroup owns a slice of K and a ring of blocks of 64 rows; its four warps each read one tile of a block.
#pragma once
#include "_w4_frag16_sm90.cuh"

#ifdef __CUDACC__
namespace gm {

template <typename T, int NT>
struct Wgmma;
template <>
struct Wgmma<__nv_bfloat16, 2> {
  static __device__ __forceinline__ void run(float (&d)[8], const uint32_t (&a)[4], uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, p, 1, 1, 0;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)));
  }
};
template <>
struct Wgmma<__half, 2> {
  static __device__ __forceinline__ void run(float (&d)[8], const uint32_t (&a)[4], uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, p, 1, 1, 0;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)));
  }
};
template <>
struct Wgmma<__nv_bfloat16, 4> {
  static __device__ __forceinline__ void run(float (&d)[16], const uint32_t (&a)[4], uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)));
  }
};
template <>
struct Wgmma<__half, 4> {
  static __device__ __forceinline__ void run(float (&d)[16], const uint32_t (&a)[4], uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)));
  }
};
template <>
struct Wgmma<__nv_bfloat16, 8> {
  static __device__ __forceinline__ void run(float (&d)[32], const uint32_t (&a)[4], uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)));
  }
};
template <>
struct Wgmma<__half, 8> {
  static __device__ __forceinline__ void run(float (&d)[32], const uint32_t (&a)[4], uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)));
  }
};

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// The matrix descriptor of x in a slot: K-major rows of 128 bytes with the 128-byte swizzle, 1024 bytes from eight rows to the next.
__device__ __forceinline__ uint64_t x_descriptor(uint32_t address) {
  return (static_cast<uint64_t>(1) << 62) | (static_cast<uint64_t>(1024 >> 4) << 32) | (static_cast<uint64_t>(1) << 16) |
         ((address & 0x3ffff) >> 4);
}

__device__ __forceinline__ uint32_t minus_offset(uint32_t pair, __nv_bfloat16) {
  uint32_t out;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(pair), "r"(0x43084308u));  // 128 + 8
  return out;
}
__device__ __forceinline__ uint32_t minus_offset(uint32_t pair, __half) {
  uint32_t out;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(pair), "r"(0x64086408u));  // 1024 + 8
  return out;
}

// NT: columns of x in eights.  RB: blocks of 64 rows a warpgroup.  WN x WK: warpgroups along N and along K.  NX: slots of x.
template <typename T, int NT, int RB, int WN, int WK, int NX>
__device__ __forceinline__ void w4_wgmma(const W4Params& p) {
  constexpr int kGroups = WN * WK, kThreads = kGroups * 128, kSlot = 4 * kTileBytes, kXSlot = NT * 8 * kTileK * 2;
  extern __shared__ __align__(1024) uint8_t smem[];
  __shared__ __align__(8) uint64_t full[kGroups][kMaxDepth], empty[kGroups][kMaxDepth];
  const int group = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0), warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0) & 3;
  const int lane = threadIdx.x & 31, g = lane >> 2, wn = group % WN, wk = group / WN, depth = p.depth;
  const int split = 1 << p.log_split, rank = blockIdx.x & (split - 1), block = blockIdx.x >> p.log_split;
  const int kb0 = (p.groups * rank) >> p.log_split, kb1 = (p.groups * (rank + 1)) >> p.log_split;
  const int steps = max(0, (kb1 - kb0 - wk + WK - 1) / WK), chunks = steps * RB;
  uint8_t* xs = smem + wk * NX * kXSlot;  // first, for its alignment
  uint8_t* ring = smem + WK * NX * kXSlot + group * depth * kSlot;
  const uint32_t full0 = smem_u32(&full[group][0]), empty0 = smem_u32(&empty[group][0]);
  const bool producer = (threadIdx.x & 127) == 0;
  const int block0 = (block * WN + wn) * RB, blocks = (p.tiles + 3) >> 2;

  uint64_t policy = 0;
  int chunk_block = 0, chunk_group = kb0 + wk;  // of the next chunk to be loaded
  const auto issue = [&](int slot) {  // the producer only
    const int b = block0 + chunk_block;
    const int tiles = min(4, p.tiles - b * 4);
    if (b < blocks) {
      mbar_expect(full0 + 8 * slot, tiles * kTileBytes);
      bulk_load(smem_u32(ring) + slot * kSlot, p.w + (static_cast<int64_t>(b) * 4 * p.groups + chunk_group * tiles) * kTileBytes,
                tiles * kTileBytes, full0 + 8 * slot, policy);
    } else {  // past the end of N: the sums are never stored
      mbar_arrive(full0 + 8 * slot);
    }
    if (++chunk_block == RB) chunk_block = 0, chunk_group += WK;
  };
  if (producer) {
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    for (int s = 0; s < depth; ++s) mbar_init(full0 + 8 * s, 1), mbar_init(empty0 + 8 * s, 4);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    for (int s = 0; s < depth && s < chunks; ++s) issue(s);
  }
  __syncthreads();
  if (split > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");

  XLoader<T, NT, WN * 4> loader(p, smem_u32(xs), NT * 8, (kb0 + wk) * kTileK, wn * 128 + (threadIdx.x & 127));
#pragma unroll
  for (int i = 0; i < NX - 1; ++i) {
    if (i < steps) loader.load(p, i * kXSlot, WK);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  float acc[RB][NT * 4], part[2][NT * 4], scale[2][2];
  uint32_t a[2][8][4];
#pragma unroll
  for (int b = 0; b < RB; ++b)
#pragma unroll
    for (int i = 0; i < NT * 4; ++i) acc[b][i] = 0.f;
  const auto add = [&](int b) {
#pragma unroll
    for (int i = 0; i < NT * 4; ++i) acc[b][i] += scale[b & 1][i >> 1 & 1] * part[b & 1][i];
  };

  int slot = 0, next = depth, last_slot = 0, xi = 0, xfree = (NX - 1) * kXSlot;
  uint32_t parity = 0, last_parity = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    asm volatile("cp.async.wait_group %0;" ::"n"(NX - 2) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync %0, %1;" ::"r"(wk + 1), "n"(WN * 128) : "memory");
    // Everyone has this step's x, and nobody's products read the previous one's any more.
    if (step + NX - 1 < steps) loader.load(p, xfree, WK);
    asm volatile("cp.async.commit_group;" ::: "memory");
    const uint64_t x = x_descriptor(smem_u32(xs) + xi);
    xfree = xi;
    if ((xi += kXSlot) == NX * kXSlot) xi = 0;

#pragma unroll
    for (int b = 0; b < RB; ++b) {
      if (producer && step * RB + b > 0 && next < chunks) {  // fill the previous chunk's slot again
        mbar_wait(empty0 + 8 * last_slot, last_parity);
        issue(last_slot);
      }
      if (step * RB + b > 0) ++next;
      mbar_wait(full0 + 8 * slot, parity);
      const uint8_t* tile = ring + slot * kSlot + warp * kTileBytes;
      const uint4 q[2] = {reinterpret_cast<const uint4*>(tile)[lane], reinterpret_cast<const uint4*>(tile)[32 + lane]};
      const uint32_t sc = reinterpret_cast<const uint32_t*>(tile + kCodeBytes)[g];
      const uint32_t emptied = empty0 + 8 * slot;
      last_slot = slot, last_parity = parity;
      if (++slot == depth) slot = 0, parity ^= 1;

#pragma unroll
      for (int s = 0; s < 8; ++s) {
        const uint4& w = q[s >> 2];
        const uint32_t word = (s & 3) == 0 ? w.x : (s & 3) == 1 ? w.y : (s & 3) == 2 ? w.z : w.w;
        a[b & 1][s][0] = minus_offset(two_codes<T, 0>(word), T());
        a[b & 1][s][1] = minus_offset(two_codes<T, 1>(word), T());
        a[b & 1][s][2] = minus_offset(two_codes<T, 2>(word), T());
        a[b & 1][s][3] = minus_offset(two_codes<T, 3>(word), T());
      }
      scale[b & 1][0] = __uint_as_float(sc << 16), scale[b & 1][1] = __uint_as_float(sc & 0xffff0000u);
      if (p.scales_half) {
        const float2 wide = __half22float2(*reinterpret_cast<const __half2*>(&sc));
        scale[b & 1][0] = wide.x, scale[b & 1][1] = wide.y;
      }
      // Not before the codes and scales are in registers: an arrival may overtake loads, so it has to depend on them.
      uint32_t zero;
      asm volatile("mov.u32 %0, %%ctaid.z;" : "=r"(zero));
      __syncwarp();
      if ((lane | ((q[0].x | q[1].x | sc) & zero)) == 0) mbar_arrive(emptied);
      wgmma_fence();
#pragma unroll
      for (int s = 0; s < 8; ++s)  // 32 bytes a step inside a row of 128, then the other half
        Wgmma<T, NT>::run(part[b & 1], a[b & 1][s], x + (s & 3) * 2 + (s >> 2) * (kXSlot / 2 >> 4), s > 0);
      wgmma_commit();
      if (b > 0) {
        wgmma_wait<1>();
        add(b - 1);
      }
    }
    wgmma_wait<0>();
    add(RB - 1);
  }

  __syncthreads();  // the rings are drained; their memory now takes the sums
  float4* scratch = reinterpret_cast<float4*>(smem);
#pragma unroll
  for (int b = 0; b < RB; ++b)
#pragma unroll
    for (int n = 0; n < NT; ++n)
      scratch[(((wk * WN + wn) * RB + b) * 4 + warp) * NT * 32 + n * 32 + lane] =
          make_float4(acc[b][n * 4], acc[b][n * 4 + 1], acc[b][n * 4 + 2], acc[b][n * 4 + 3]);
  finish_sums<T, NT, WN * RB * 4, WK, kThreads>(p, smem, block * WN * RB * 4, rank);
}

}  // namespace gm
#endif
