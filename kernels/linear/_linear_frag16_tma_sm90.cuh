// Weight-only linear for Hopper at M > 16: a warp-specialised, persistent product over the tiles of a frag16 layout.
//
// The product is transposed, Y^T = W X^T: decoded weights are wgmma's register operand, so a weight is decoded once for MT rows of x and
// never touches shared memory again; x is the shared operand. A CTA owns C blocks of 64 rows of W and MT rows of x:
//  - two threads of the last warpgroup fill a ring each: weights (a group of 128 k a slot, by bulk copies) and x (64 k a slot, by the
//    tensor copy engine in the 128-byte swizzle). Weights do not depend on the kernel before: theirs runs ahead of griddepcontrol.wait.
//  - each other warpgroup takes 64 rows of W: it decodes the 16 k of a product while the product before runs. It has the registers that
//    the last one gives up.
// CTAs walk over tiles of Y, and the copies of the next tile run during the end of the last. What does not fill the machine evenly is dealt
// out along K: partial sums meet in scratch memory, in a fixed order. Or a tile is shared by the CTAs of a cluster, which add their sums
// in the order of ranks.
#pragma once
#include "_tiles_of_y_sm90.cuh"
#include "_wgmma_rs_sm90.cuh"
#include "_wgmma_weights_sm90.cuh"

#ifdef __CUDACC__
#include <cuda.h>

namespace gm {

__device__ __forceinline__ void tensor_load(uint32_t dst, const CUtensorMap* map, int k, int row, uint32_t bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(dst),
               "l"(map), "r"(k), "r"(row), "r"(bar)
               : "memory");
}

__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Place in a ring of N slots of SIZE bytes, SLOTS bytes into shared memory: the addresses of a slot and of its barrier "filled", which is
// BARS bytes into it, N * 8 before the one "emptied"; and the parity of this pass over the ring.
template <int N, int SIZE, int SLOTS, int BARS>
struct Ring {
  uint32_t slot, full, parity = 0;
  __device__ __forceinline__ Ring(uint32_t base) : slot(base + SLOTS), full(base + BARS) {}
  __device__ __forceinline__ uint32_t empty() const { return full + N * 8; }
  __device__ __forceinline__ void next(uint32_t base) {
    slot += SIZE, full += 8;
    if (full == base + BARS + N * 8) slot = base + SLOTS, full = base + BARS, parity ^= 1;
  }
};

template <int REGISTERS>
__device__ __forceinline__ void registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// W: the kind of weight, a class of _wgmma_weights_sm90.cuh.  MT: rows of x.  C: warpgroups, each with 64 rows of W.  REGISTERS: theirs,
// GIVEN: the last one's.  XS, WS: slots of the rings.  CHAINS: sums that products take turns to add to, where a product is too short to hide
// the one before it.  PENDING: products at work.
template <typename W, int MT, int C, int REGISTERS, int GIVEN, int XS, int WS, int CHAINS, int PENDING>
__device__ __forceinline__ void linear_tma(const TmaParams& p, const CUtensorMap& x_map) {
  using T = typename W::Type;
  constexpr int kTile = W::kBytes, kXSlot = MT * kXSlotK * 2, kWSlot = C * 4 * kTile, kFragments = MT / 8, kThreads = C * 128;
  constexpr int kBuffers = PENDING + 1, kAhead = MT == 32 ? 4 : 1;  // parts of a sum loaded at a time
  extern __shared__ __align__(1024) uint8_t smem[];
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  uint32_t base;  // volatile: computed once
  asm volatile("{\n.reg .u64 a;\ncvta.to.shared.u64 a, %1;\ncvt.u32.u64 %0, a;\n}" : "=r"(base) : "l"(smem));
  constexpr int kWRing = XS * kXSlot, kStaging = kWRing + WS * kWSlot, kBars = kStaging + C * 4 * 1024;
  using XRing = Ring<XS, kXSlot, 0, kBars>;
  using WRing = Ring<WS, kWSlot, kWRing, kBars + XS * 16>;
  if (threadIdx.x == 0) {
    const XRing x(base);
    const WRing w(base);
    for (int i = 0; i < XS; ++i) mbar_init(x.full + i * 8, 1), mbar_init(x.empty() + i * 8, C * 4);
    for (int i = 0; i < WS; ++i) mbar_init(w.full + i * 8, 1), mbar_init(w.empty() + i * 8, C * 4);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

  if (warp >= C * 4) {
    registers_down<GIVEN>();
    // A ring's first pass finds its slots empty: the phase before the first counts as over.
    if (threadIdx.x == C * 128) {
      asm volatile("prefetch.tensormap [%0];" ::"l"(&x_map) : "memory");
      Walk walk(p);
      XRing x(base);
      int index, k;
#pragma unroll 1
      for (int groups; (groups = walk.next(p, index, k)) > 0;) {
        const int row = tile_at(p, index).m * MT;
        k *= kTileK;
        asm volatile("griddepcontrol.wait;" ::: "memory");  // here, so that a kernel's first divisions do not come after it
#pragma unroll 1
        for (int h = groups * 2; h > 0; --h, k += kXSlotK) {
          mbar_wait(x.empty(), x.parity ^ 1);
          mbar_expect(x.full, kXSlot);
          tensor_load(x.slot, &x_map, k, row, x.full);
          x.next(base);
        }
      }
    } else if (threadIdx.x == C * 128 + 32) {  // immutable weights: nothing to wait for but an empty slot
      Walk walk(p);
      WRing w(base);
      uint64_t policy;
      if (p.m_tiles > 1) asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
      else asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
      int index, k;
#pragma unroll 1
      for (int groups; (groups = walk.next(p, index, k)) > 0;) {
        const int block = tile_at(p, index).n * C, here = p.tiles16 - block * 4;
        const int64_t block_bytes = static_cast<int64_t>(p.groups) * (4 * kTile);
        const uint8_t* from = p.w + block * block_bytes;
        if (here >= C * 4) {  // not by way of min(here, C * 4) kept above 0: ptxas 13.0 then branched wrongly
          from += k * (4 * kTile);
#pragma unroll 1
          for (int left = groups; left > 0; --left, from += 4 * kTile) {
            mbar_wait(w.empty(), w.parity ^ 1);
            mbar_expect(w.full, kWSlot);
#pragma unroll
            for (int b = 0; b < C; ++b) bulk_load(w.slot + b * 4 * kTile, from + b * block_bytes, 4 * kTile, w.full, policy);
            w.next(base);
          }
        } else {  // the last rows of W
#pragma unroll 1
          for (int last = k + groups; k < last; ++k) {
            mbar_wait(w.empty(), w.parity ^ 1);
            mbar_expect(w.full, here * kTile);
#pragma unroll 1
            for (int b = 0; b * 4 < here; ++b) {
              const int bytes = min(4, here - b * 4) * kTile;
              bulk_load(w.slot + b * 4 * kTile, from + b * block_bytes + k * static_cast<int64_t>(bytes), bytes, w.full, policy);
            }
            w.next(base);
          }
        }
      }
    }
    __syncwarp();
    if (p.log_split > 0) {
      cluster_barrier();
      cluster_barrier();
    }
  } else {
    registers_up<REGISTERS>();
    Walk walk(p);
    XRing x(base);
    WRing w(base);
    const uint32_t my_tile = warp * kTile, staging = base + kStaging + warp * 1024;
    asm volatile("griddepcontrol.wait;" ::: "memory");

    int index, k;
#pragma unroll 1
    for (int groups; (groups = __shfl_sync(0xffffffffu, walk.next(p, index, k), 0)) > 0;) {  // so that the compiler sees one value a warp
      float acc[CHAINS][MT / 2];
      uint32_t a[PENDING + 1][4];
      mbar_wait(w.full, w.parity);
      typename W::Part part[2];
      W weights;
      part[0].load(w.slot + my_tile, lane, 0);
      uint32_t last_x = 0;
      int add = 0;
#pragma unroll 1
      for (int left = groups; left > 0; --left) {
        part[1].load(w.slot + my_tile, lane, 1);
        weights.decode(0, part[0], a[0], p.scales_half);
        uint64_t rows = 0;
#pragma unroll
        for (int s = 0; s < 8; ++s) {
          if (s % 4 == 0) {
            mbar_wait(x.full, x.parity);
            rows = swizzled_rows(x.slot);
          }
          wgmma_fence();
          Product<T, MT>::run(acc[s % CHAINS], a[s % kBuffers], rows + (s & 3) * 2, s >= CHAINS ? 1 : add);  // 16 k are 32 bytes
          wgmma_commit();
          wgmma_wait<PENDING>();  // that many products at work: the operands of the one before them may change
          if (s % 4 == PENDING - 1 && (s > 3 || add != 0) && lane == 0) mbar_arrive(last_x);  // and its slot of x is done with
          if (s % 4 == 3) last_x = x.empty(), x.next(base);
          if (s == 0) {
            // Not before the codes are in registers: an arrival may overtake loads, so it has to depend on them.
            uint32_t zero;
            asm volatile("mov.u32 %0, %%ctaid.z;" : "=r"(zero));
            if ((lane | ((part[0].any(0) | part[1].any(1)) & zero)) == 0) mbar_arrive(w.empty());
            w.next(base);
          }
          if (s == 3 && left > 1) {
            mbar_wait(w.full, w.parity);
            part[0].load(w.slot + my_tile, lane, 0);
          }
          if (s < 7) weights.decode(s + 1, part[(s + 1) >> 2], a[(s + 1) % kBuffers], p.scales_half);
        }
        add = 1;
      }
      wgmma_wait<0>();
      if (lane == 0) mbar_arrive(last_x);
      float (&sum)[MT / 2] = acc[0];
      if constexpr (CHAINS == 2) {
#pragma unroll
        for (int i = 0; i < MT / 2; ++i) sum[i] += acc[1][i];
      }

      if (groups < p.groups && p.log_split == 0) {
        // Sums lie as the threads hold them; a flag a warp. Whoever has a tile's first groups adds the others' sums, in the order of k.
        constexpr int kPartBytes = MT * C * 256;
        uint32_t* flags = reinterpret_cast<uint32_t*>(p.scratch);
        uint8_t* parts = p.scratch + kFlagBytes;
        int first = Walk::part();
        const auto flag_of = [&](int part) { return flags + part * C * 4 + warp; };
        const auto sums_of = [&](int part) {
          return reinterpret_cast<float4*>(parts + static_cast<int64_t>(part) * kPartBytes) + threadIdx.x;
        };
        if (k > 0) {
          float4* to = sums_of(first);
#pragma unroll
          for (int f = 0; f < kFragments; ++f)
            __stcg(to + f * kThreads, make_float4(sum[f * 4], sum[f * 4 + 1], sum[f * 4 + 2], sum[f * 4 + 3]));
          __syncwarp();
          if (lane == 0) asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(flag_of(first)) : "memory");
          continue;
        }
        const int end = (index + 1) * p.groups;
        for (int count = 32; count == 32;) {  // the flags of 32 parts at a time, a lane each
          const bool there = Walk::begin(p, ++first + lane) < end;
          uint32_t* flag = flag_of(first + lane);
          uint32_t set = 1;
          do {
            if (there) asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(set) : "l"(flag) : "memory");
          } while (__any_sync(0xffffffffu, set == 0));  // a vote, so that the compiler sees one path for the warp
          __syncwarp();
          if (there) *flag = 0;
          count = __popc(__ballot_sync(0xffffffffu, there));
#pragma unroll(kAhead)
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

      const Tile tile = tile_at(p, index);
      const int n0 = (tile.n * C * 4 + warp) * kTileRows, m0 = tile.m * MT;
      float bias[2] = {0.f, 0.f}, by[2] = {W::kFactor, W::kFactor};
      if (p.row_scale != nullptr) {
        const int row = n0 + (lane >> 2);
        if (row < p.n) by[0] = p.row_scale[row];
        if (row + 8 < p.n) by[1] = p.row_scale[row + 8];
      }
      if (p.bias != nullptr) {
        const int row = n0 + (lane >> 2);
        if (row < p.n) bias[0] = Num<T>::wide(static_cast<const T*>(p.bias)[row]);
        if (row + 8 < p.n) bias[1] = Num<T>::wide(static_cast<const T*>(p.bias)[row + 8]);
      }
      if (p.log_split == 0) {
#pragma unroll
        for (int f = 0; f < kFragments; f += 2) {
          float v[8];
#pragma unroll
          for (int i = 0; i < 8; ++i) v[i] = sum[f * 4 + i];
          store_fragments<T>(p, v, by, bias, staging + (f & 2) * 256, n0, m0 + f * 8, p.m);
        }
      } else {
        // Every CTA of the cluster has used up its rings: they take the sums. Each CTA owns a share of the fragments.
        __syncwarp();
        cluster_barrier();
        const int split = 1 << p.log_split, rank = blockIdx.x & (split - 1), share = kFragments >> p.log_split;
#pragma unroll
        for (int f = 0; f < kFragments; ++f) {
          const int owner = f / share;
          uint32_t to = base + ((rank * share + f - owner * share) * kThreads + threadIdx.x) * 16;
          asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(to) : "r"(owner));
          asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(sum[f * 4]), "f"(sum[f * 4 + 1]),
                       "f"(sum[f * 4 + 2]), "f"(sum[f * 4 + 3])
                       : "memory");
        }
        cluster_barrier();
#pragma unroll 1
        for (int f = 0; f < share; f += 2) {
          float v[8] = {};
#pragma unroll
          for (int i = 0; i < 2; ++i)
            for (int r = 0; r < split && f + i < share; ++r) {
              const float4 part = reinterpret_cast<const float4*>(smem)[(r * share + f + i) * kThreads + threadIdx.x];
              v[i * 4] += part.x, v[i * 4 + 1] += part.y, v[i * 4 + 2] += part.z, v[i * 4 + 3] += part.w;
            }
          const int first = rank * share + f, end = first + min(2, share - f);
          store_fragments<T>(p, v, by, bias, staging + (f & 2) * 256, n0, m0 + first * 8, min(p.m, m0 + end * 8));
        }
      }
    }
  }
}

}  // namespace gm
#endif
