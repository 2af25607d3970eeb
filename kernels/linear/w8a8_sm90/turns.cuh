// The same product where operand A is x, for many tokens: the warpgroups multiply in turns, and a tile ends without
// barriers.
//
// Left alone, both warpgroups wait for the same slot, multiply at the same time, and then both add to their float32
// sums while the tensor cores have nothing to do. In turns, one multiplies while the other adds: a warpgroup issues the
// products of a slot with 64 of its rows, which takes until most of them have run, and hands the turn over. int8 sums
// stay in the tensor cores' registers and take no turns.
#pragma once
#include "product.cuh"

#ifdef __CUDACC__

namespace gm::w8a8 {

// The named barrier of the first warpgroup's turn; those of tiles' ends are 1 and 2.
constexpr int kFirstTurn = 3;

constexpr int kPart = 16 * 128;  // bytes that a warp stages: 16 rows of 64 columns

// Rounds a warp's 16 of 64 rows of x, from fragments of all columns, and stages 64 columns at a time in shared memory:
// at part(column), from which write(column) takes them. shared: the scales are there, as of the warpgroup's table.
template <class S, typename Sum, typename Part, typename Write>
__device__ __forceinline__ void stage_rows(const Params& p, const Sum (&sums)[S::kSums],
                                           const uint8_t* shared, int n0, int m0, int half, const Part& part,
                                           const Write& write) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, pair = (lane & 3) * 2;
  const int row = half * 64 + warp * 16, low = row + (lane >> 2), matrix_row = lane & 15;
  const int2* tokens = reinterpret_cast<const int2*>(shared + S::kTable);  // scale and offset
  // Scale and bias of two features at a time.
  const float4* features = reinterpret_cast<const float4*>(shared + S::kTable + S::kTokenScales);
  const int2 of_x[2] = {tokens[low], tokens[low + 8]};
#pragma unroll
  for (int column = 0; column < S::kColumns; column += S::kStaged) {
    constexpr int kFragments = S::kStaged / 8;
    static_assert(S::kColumns % S::kStaged == 0 && kFragments % 2 == 0);
    float v[kFragments][4];
#pragma unroll
    for (int j = 0; j < kFragments; ++j) {
      const Sum* sum = sums + column / 2 + j * 4;
      if (!S::kBlocks || p.bias != nullptr) {
        const float4 of_w = features[(column + j * 8 + pair) / 2];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int2 x = of_x[i >> 1];
          const float value = kIntegers<Sum> ? static_cast<float>(sum[i] - static_cast<Sum>(x.y)) : sum[i];
          const float scale = i & 1 ? of_w.z : of_w.x, bias = i & 1 ? of_w.w : of_w.y;
          v[j][i] = (S::kBlocks ? value : value * (__int_as_float(x.x) * scale)) + bias;
        }
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) v[j][i] = sum[i];
      }
    }
    if (p.residual != nullptr) {
#pragma unroll
      for (int j = 0; j < kFragments; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int m = m0 + low + (i >> 1) * 8, n = n0 + column + j * 8 + pair + (i & 1);
          if (m < p.m && n < p.n) v[j][i] += widened(p.residual, static_cast<int64_t>(m) * p.n + n, p.half);
        }
    }
    const auto stage = [&](int half_type) {
#pragma unroll
      for (int j = 0; j < kFragments; j += 2) {  // two fragments: four matrices
        const uint32_t four[4] = {rounded(v[j][0], v[j][1], half_type), rounded(v[j][2], v[j][3], half_type),
                                  rounded(v[j + 1][0], v[j + 1][1], half_type),
                                  rounded(v[j + 1][2], v[j + 1][3], half_type)};
        stmatrix_x4(part(column) + matrix_row * 128 + (((j + (lane >> 4)) ^ (matrix_row & 7)) << 4), four);
      }
    };
    if (p.half)
      stage(1);
    else
      stage(0);
    write(column);
  }
}

// Stores a warp's 16 of 64 rows of x, through its own part of the warpgroup's table.
template <class S, typename Sum>
__device__ __forceinline__ void store_rows(const Params& p, const Sum (&sums)[S::kSums], uint32_t table,
                                           const uint8_t* shared, int n0, int m0, int half) {
  constexpr int kFragments = S::kStaged / 8;
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, row = half * 64 + warp * 16;
  const uint32_t part = table + warp * kPart;
  const uint8_t* const stored = shared + warp * kPart;
  const int chunk = lane & 7, first = lane >> 3;
  uint16_t* const y =
      static_cast<uint16_t*>(p.y) + static_cast<int64_t>(m0 + row + first) * p.n + n0 + chunk * 8;
  const auto write = [&](int column) {
    __syncwarp();
    const int n = n0 + column + chunk * 8;
    const bool mine = chunk < kFragments && n < p.n;
    const auto words_of = [&](int at) {
      return *reinterpret_cast<const uint4*>(stored + at * 128 + ((chunk ^ (at & 7)) << 4));
    };
    if (p.vector) {
      uint4 words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = words_of(i * 4 + first);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (mine && m0 + row + i * 4 + first < p.m)
          *reinterpret_cast<uint4*>(y + i * 4 * static_cast<int64_t>(p.n) + column) = words[i];
    } else if (mine) {
#pragma unroll 1
      for (int at = first; at < 16 && m0 + row + at < p.m; at += 4) {
        const uint4 words = words_of(at);
        const uint32_t word[4] = {words.x, words.y, words.z, words.w};
        uint16_t* const to = y + static_cast<int64_t>(at - first) * p.n + column;
#pragma unroll
        for (int i = 0; i < 8; ++i)
          if (n + i < p.n) to[i] = static_cast<uint16_t>(word[i / 2] >> (i % 2 * 16));
      }
    }
    __syncwarp();  // the part has been read
  };
  stage_rows<S>(p, sums, shared, n0, m0, half, [&](int) { return part; }, write);
}

// Main loop of a tile of int8, whose sums stay in the registers of the products.
template <class S, int HALVES, int SUMS, typename Multiply, typename Release>
__device__ __forceinline__ void multiply_integers(const Params& p, int (&sums)[HALVES][SUMS], Ring<S>& ring,
                                                  const Multiply& multiply, const Release& release) {
  uint32_t before = 0;  // the empty barrier of the slot before
#pragma unroll 1
  for (int left = p.k_blocks; left > 0; --left, ring.next()) {
    mbar_wait(ring.full, ring.parity);
#pragma unroll
    for (int h = 0; h < HALVES; ++h) multiply(sums[h], ring, h, before != 0);
    wgmma_wait<HALVES>();
    if (before != 0) release(before);
    before = ring.empty();
  }
  wgmma_wait<0>();
  for (auto& half : sums) wgmma_fence_operand(half);
  release(before);
}

template <typename T, class S>
__device__ __forceinline__ void product_in_turns(const Params& p, const CUtensorMap& w_map,
                                                 const CUtensorMap& x_map) {
  static_assert(S::kPlain);
  using Sum = typename T::Sum;
  constexpr int kSums = S::kSums, kBoth = 2 * 128;
  constexpr bool kTurns = S::kWarpgroups == 2 && !kIntegers<Sum>;
  extern __shared__ __align__(1024) uint8_t smem[];
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  const uint32_t base = smem_u32(smem);
  init_ring<S>(base, p.slots, S::kWarpgroups * 4);
  __syncthreads();
  griddepcontrol_launch_dependents();
  const int all = p.n_tiles * p.m_tiles, step = gridDim.x;

  if (warp >= S::kWarpgroups * 4) {
    if constexpr (S::kReallocates) setmaxnreg_dec<40>();
    if (threadIdx.x == S::kMathThreads) produce<S>(p, &w_map, &x_map, base, blockIdx.x, step, 0, p.k_blocks);
    return;
  }
  if constexpr (S::kReallocates) setmaxnreg_inc<232>();
  const int warpgroup = warp >> 2, rows = warpgroup * 64 * S::kHalves, my_rows = (warp & 3) * 16;
  const int my_turn = kFirstTurn + warpgroup, other_turn = kFirstTurn + 1 - warpgroup;
  const uint32_t epilogue_at = S::rings(p.slots) + warpgroup * S::kEpilogue, table = base + epilogue_at;
  Ring<S> ring(base, p.slots);
  ScalesOf<S> scales[1];
  if constexpr (S::kBlocks) scales[0].load(p, tile_at<S>(p, blockIdx.x).n, 0);
  if (kTurns && warpgroup == 1) bar_arrive(kFirstTurn, kBoth);
  griddepcontrol_wait();
  const auto release = [&](uint32_t empty) {
    __syncwarp();
    if (lane == 0) mbar_arrive(empty);
  };
  const auto multiply = [&](Sum(&d)[kSums], const Ring<S>& r, int h, int add) {
    if constexpr (kTurns) bar_sync(my_turn, kBoth);
    multiply_slot<T, S>(d, r, rows + h * 64, add);
    if constexpr (kTurns) bar_arrive(other_turn, kBoth);
  };
#pragma unroll 1
  for (int index = blockIdx.x; index < all; index += step) {
    const Tile tile = tile_at<S>(p, index);
    const EpilogueOperands<S, Sum> operands(p, tile.n, tile.m + rows);
    if constexpr (S::kBlocks)
      scales[0].begin(p, 0), scales[0].load(p, tile_at<S>(p, min(index + step, all - 1)).n, 0);
    Sum sums[S::kHalves][kSums] = {};
    if constexpr (kIntegers<Sum>) {
      multiply_integers(p, sums, ring, multiply, release);
    } else {
      float parts[S::kHalves > 1 ? 1 : 2][kSums];
      Factors<S> factors[S::kHalves > 1 ? 1 : 2];
      multiply_blocks<T, S>(
          p, sums, ring, scales, rows, my_rows, 0, p.k_blocks, [&](int) { return tile.n; }, parts, factors,
          multiply, release);
    }
    bar_sync(warpgroup + 1, 128);  // the table of the last tile has been read
    operands.store(table, warpgroup);
#pragma unroll
    for (int h = 0; h < S::kHalves; ++h)
      store_rows<S>(p, sums[h], table, smem + epilogue_at, tile.n, tile.m + rows, h);
  }
  if (kTurns && warpgroup == 0) bar_sync(kFirstTurn, kBoth);  // of the other's last turn
}

}  // namespace gm::w8a8
#endif
