// y[M, N] = x[M, K] · W[N, K]^T of 8-bit values: a warp-specialised, persistent product.
//
// A producer thread fills a ring of slots of 128 k by TMA; consumer warpgroups multiply 64 rows of operand A, or twice
// 64, by all rows of operand B. For few tokens the product is transposed, Y^T = W X^T, so that tokens are wgmma's N and
// pad to 8 instead of 64. wgmma accumulates e4m3 products with about 14 bits: after each 128 k they are promoted to
// float32 accumulators, times the scales of their blocks if there are any (the two-level accumulation of DeepSeek-V3).
// With one block of 64 rows a warpgroup has two sets of registers, and promotes one while the other is multiplied; with
// two blocks it has one set, and overlaps with the other warpgroup. int8 sums are exact and need no promotion. Few
// tiles are split along K over the CTAs of a cluster, which reduce their sums in the order of ranks.
#pragma once
#include "store.cuh"
#include "sm90/wgmma.cuh"

#ifdef __CUDACC__
#include <type_traits>

namespace gm::w8a8 {

// Types of x and W; Operands<true> where operand A is x.
struct E4m3 {
  using Sum = float;
  template <bool PLAIN>
  using Operands = gm::E4m3;
};
struct Int8 {  // W is offset by 128, so unsigned
  using Sum = int32_t;
  template <bool PLAIN>
  using Operands = std::conditional_t<PLAIN, S8U8, U8S8>;
};

// Promotes the products of block k with 64 rows of A: adds them, scaled, to the accumulators. n: first row of W of the
// warp.
template <class S>
__device__ __forceinline__ void promote(const Params& p, float (&sum)[S::kSums],
                                        const float (&part)[S::kSums], const ScalesOf<S>& scales,
                                        const Factors<S>& factors, int k, int n, uint32_t x_scales) {
  if constexpr (!S::kBlocks) {
#pragma unroll
    for (int i = 0; i < S::kSums; ++i) sum[i] += part[i];
  } else {
    const int low = (threadIdx.x & 31) >> 2, pair = (threadIdx.x & 3) * 2;
    const float w = factors.w;
    const auto add = [&](auto scale_of) {
#pragma unroll
      for (int j = 0; j < S::kColumns / 8; ++j) {
        const float4 by = scale_of(j);
        sum[j * 4] += part[j * 4] * by.x, sum[j * 4 + 1] += part[j * 4 + 1] * by.y;
        sum[j * 4 + 2] += part[j * 4 + 2] * by.z, sum[j * 4 + 3] += part[j * 4 + 3] * by.w;
        // Keeps the compiler from hoisting loads of scales, which would spill.
#pragma unroll
        for (int i = j * 4; i < j * 4 + 4; ++i) asm volatile("" : "+f"(sum[i]));
      }
    };
    if constexpr (S::kPlain) {
      const float x[2] = {factors.of[0], factors.of[1]}, of[2] = {x[0] * w, x[1] * w};
      if (scales.same) {
        if constexpr (S::kStraddles) {
          const float other[2] = {x[0] * factors.other_w, x[1] * factors.other_w};
          add([&](int j) {
            const bool leads = j / 4 < scales.leading;
            const float low = leads ? of[0] : other[0], high = leads ? of[1] : other[1];
            return make_float4(low, low, high, high);
          });
        } else {
          add([&](int) { return make_float4(of[0], of[0], of[1], of[1]); });
        }
      } else
        add([&](int j) {
          const float c[2] = {scales.of_row(p, n + j * 8 + pair, k),
                              scales.of_row(p, n + j * 8 + pair + 1, k)};
          return make_float4(x[0] * c[0], x[0] * c[1], x[1] * c[0], x[1] * c[1]);
        });
    } else {
      const uint32_t mine = x_scales + pair * 4;
      if (scales.same) {
        add([&](int j) {
          const float2 x = ld_shared<float2>(mine + j * 32);
          return make_float4(x.x * w, x.y * w, x.x * w, x.y * w);
        });
      } else {
        const float c[2] = {scales.of_row(p, n + low, k), scales.of_row(p, n + low + 8, k)};
        add([&](int j) {
          const float2 x = ld_shared<float2>(mine + j * 32);
          return make_float4(x.x * c[0], x.y * c[0], x.x * c[1], x.y * c[1]);
        });
      }
    }
  }
}

// Lower word of the descriptor of a slot's operand at an address in shared memory; the upper words of all are the same.
__device__ __forceinline__ uint32_t described(uint32_t address) {
  return static_cast<uint32_t>(swizzle128_descriptor(address));
}

// Issues the products of a slot with 64 rows of A, whose descriptors have the lower words a and b, as one wgmma group: of
// the 32 columns FIRST to LAST of its 4 times 32.
template <typename T, class S, int FIRST = 0, int LAST = 4>
__device__ __forceinline__ void multiply_described(typename T::Sum (&d)[S::kSums], uint32_t a, uint32_t b,
                                                   int add) {
  using Operands = typename T::template Operands<S::kPlain>;
  const uint64_t upper = swizzle128_descriptor(0) >> 32 << 32;
  wgmma_fence();
#pragma unroll
  for (int s = FIRST; s < LAST; ++s)
    Wgmma<Operands, S::kColumns>::ss(d, upper | (a + s * 2), upper | (b + s * 2), s > FIRST ? 1 : add);
  wgmma_commit();
}

// The same from row `row` of the tile on.
template <typename T, class S>
__device__ __forceinline__ void multiply_slot(typename T::Sum (&d)[S::kSums], const Ring<S>& r, int row,
                                              int add) {
  multiply_described<T, S>(d, described(r.a + row * kBlockK), described(r.b), add);
}

// Main loop of a tile of e4m3 over blocks of k first .. last, with two-level accumulation. parts, all_factors: registers
// of products in flight and of their scales. rows, my_rows: first row of A of the warpgroup in the tile, of the warp in
// 64 rows. w_row(h): first row of W of the warp in half h. release(bar): arrives at an empty barrier.
template <typename T, class S, int SCALES, typename Row, typename Multiply, typename Release>
__device__ __forceinline__ void multiply_blocks(const Params& p,
                                                typename T::Sum (&sums)[S::kHalves][S::kSums], Ring<S>& ring,
                                                ScalesOf<S> (&scales)[SCALES], int rows, int my_rows,
                                                int first, int last, const Row& w_row,
                                                float (&parts)[S::kHalves > 1 ? 1 : 2][S::kSums],
                                                Factors<S> (&all_factors)[S::kHalves > 1 ? 1 : 2],
                                                const Multiply& multiply, const Release& release) {
  constexpr int kSums = S::kSums, kScales = SCALES;
  const int lane = threadIdx.x & 31;
  if constexpr (S::kHalves > 1) {
    float (&part)[kSums] = parts[0];
#pragma unroll 1
    for (int k = first; k < last; ++k) {
      mbar_wait(ring.full, ring.parity);
      Factors<S>& factors = all_factors[0];
      float w = 1.f;
#pragma unroll
      for (int h = 0; h < S::kHalves; ++h) {
        multiply(part, ring, h, 0);
        if constexpr (S::kBlocks) {
          if (h < kScales) w = scales[h].at(p, k, first);
          factors.load(w, rows + h * 64 + my_rows + (lane >> 2), ring.scales);
        }
        wgmma_wait<0>();
        wgmma_fence_operand(part);
        promote<S>(p, sums[h], part, scales[S::kPlain ? 0 : h], factors, k, w_row(h), ring.scales);
        wgmma_fence_operand(sums[h]);
      }
      release(ring.empty());
      ring.next();
    }
  } else {
    float (&part)[2][kSums] = parts;
    Factors<S>(&factors)[2] = all_factors;
    uint32_t pending_empty = ring.empty(), x_scales = ring.scales;  // of the slot that is promoted next
    const uint32_t empty_end = pending_empty + (p.slots - ring.index) * 8;
    int k = first;
    int issued = first;
    const auto issue = [&](int set) {
      mbar_wait(ring.full, ring.parity);
      multiply(part[set], ring, 0, 0);
      if constexpr (S::kStraddles) factors[set].other_w = scales[0].other.at(p, issued, first);
      if constexpr (S::kBlocks)
        factors[set].load(scales[0].at(p, issued++, first), rows + my_rows + (lane >> 2), ring.scales);
      ring.next();
    };
    const auto add = [&](int set) {
      wgmma_fence_operand(part[set]);
      promote<S>(p, sums[0], part[set], scales[0], factors[set], k, w_row(0), x_scales);
      wgmma_fence_operand(sums[0]);  // before the next products overwrite part
      release(pending_empty);
      pending_empty += 8, x_scales += S::kScales;
      if (pending_empty == empty_end) pending_empty -= p.slots * 8, x_scales -= p.slots * S::kScales;
      ++k;
    };
    issue(0);
    int left = last - first - 1;
#pragma unroll 1
    for (; left >= 2; left -= 2) {
      issue(1);
      wgmma_wait<1>();
      add(0);
      issue(0);
      wgmma_wait<1>();
      add(1);
    }
    if (left > 0) {
      issue(1);
      wgmma_wait<1>();
      add(0);
      wgmma_wait<0>();
      add(1);
    } else {
      wgmma_wait<0>();
      add(0);
    }
  }
}

template <typename T, class S>
__device__ __forceinline__ void product(const Params& p, const CUtensorMap& w_map, const CUtensorMap& x_map) {
  using Sum = typename T::Sum;
  constexpr int kSums = S::kSums;
  extern __shared__ __align__(1024) uint8_t smem[];
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  const uint32_t base = smem_u32(smem);
  const int split = 1 << p.log_split, rank = p.log_split > 0 ? cluster_rank() : 0;
  init_ring<S>(base, p.slots, S::kWarpgroups * 4);
  __syncthreads();
  griddepcontrol_launch_dependents();
  const int first_tile = blockIdx.x / split, step = gridDim.x / split;
  const int first = p.k_blocks * rank >> p.log_split, last = p.k_blocks * (rank + 1) >> p.log_split;

  if (warp >= S::kWarpgroups * 4) {
    if constexpr (S::kReallocates) setmaxnreg_dec<40>();
    if (threadIdx.x == S::kMathThreads) produce<S>(p, &w_map, &x_map, base, first_tile, step, first, last);
    __syncwarp();
    if (p.log_split > 0) {
      cluster_sync();
      cluster_sync();
    }
  } else {
    if constexpr (S::kReallocates) setmaxnreg_inc<232>();
    const int warpgroup = warp >> 2, all = p.n_tiles * p.m_tiles;
    const int rows = warpgroup * 64 * S::kHalves,
              my_rows = (warp & 3) * 16;  // of A: the warpgroup's, the warp's in 64
    const uint32_t epilogue_at = S::rings(p.slots) + warpgroup * S::kEpilogue, table = base + epilogue_at;
    const uint8_t* shared = smem + epilogue_at;
    Ring<S> ring(base, p.slots);
    BlockScales<S> scales[S::kPlain ? 1 : S::kHalves];
    constexpr int kScales = sizeof scales / sizeof *scales;
    const auto w_row = [&](const Tile& tile, int h) {
      return tile.n + (S::kPlain ? 0 : rows + h * 64 + my_rows);
    };
    if (S::kBlocks && first_tile < all) {
      const Tile tile = tile_at<S>(p, first_tile);
#pragma unroll
      for (int h = 0; h < kScales; ++h) scales[h].load(p, w_row(tile, h), first);
    }
    griddepcontrol_wait();
    const auto release = [&](uint32_t empty) {
      __syncwarp();
      if (lane == 0) mbar_arrive(empty);
    };
#pragma unroll 1
    for (int index = first_tile; index < all; index += step) {
      const Tile tile = tile_at<S>(p, index);
      const int n0 = tile.n + (S::kPlain ? 0 : rows), m0 = tile.m + (S::kPlain ? rows : 0);
      const EpilogueOperands<S, Sum> operands(p, n0, m0);
      if constexpr (S::kBlocks) {
        const Tile next = tile_at<S>(p, min(index + step, all - 1));
#pragma unroll
        for (int h = 0; h < kScales; ++h) scales[h].begin(p, first), scales[h].load(p, w_row(next, h), first);
      }
      Sum sums[S::kHalves][kSums] = {};
      const auto multiply = [&](Sum(&d)[kSums], const Ring<S>& r, int h, int add) {
        multiply_slot<T, S>(d, r, rows + h * 64, add);
      };
      if constexpr (kIntegers<Sum>) {
        uint32_t pending_empty = 0;
#pragma unroll 1
        for (int k = first; k < last; ++k) {
          mbar_wait(ring.full, ring.parity);
#pragma unroll
          for (int h = 0; h < S::kHalves; ++h) multiply(sums[h], ring, h, k > first);
          wgmma_wait<S::kHalves>();
          if (k > first) release(pending_empty);
          pending_empty = ring.empty();
          ring.next();
        }
        wgmma_wait<0>();
#pragma unroll
        for (int h = 0; h < S::kHalves; ++h) wgmma_fence_operand(sums[h]);
        release(pending_empty);
      } else {
        float parts[S::kHalves > 1 ? 1 : 2][kSums];
        Factors<S> all_factors[S::kHalves > 1 ? 1 : 2];
        multiply_blocks<T, S>(
            p, sums, ring, scales, rows, my_rows, first, last, [&](int h) { return w_row(tile, h); }, parts,
            all_factors, multiply, release);
      }
      operands.store(table, warpgroup);
      if (p.log_split == 0) {
        constexpr int kStoreColumns = S::kColumns < 64 ? S::kColumns : 64;
#pragma unroll
        for (int h = 0; h < S::kHalves; ++h)
#pragma unroll
          for (int column = 0; column < S::kColumns; column += kStoreColumns)
            store_fragments<S, kStoreColumns / 8>(p, sums[h] + column / 2, table, shared, warpgroup, n0, m0,
                                                  h, column);
      } else if constexpr (!S::kPlain) {
        __syncwarp();
        cluster_sync();  // every CTA of the cluster has drained its rings
        reduce<S>(p, sums, base, smem, table, shared, warpgroup, rank, n0, m0);
      }
    }
  }
}

}  // namespace gm::w8a8
#endif
