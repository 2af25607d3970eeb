// y[M, N] = x[M, K] · W[N, K]^T on block-scaled codes at any M, for sm_120 and sm_121, by the tiles of tile.cuh. CTAs are persistent, and
// share the last tiles of y along K (stream_k.cuh).
#pragma once
#include "tile.cuh"

#ifdef __CUDACC__
#include "sm80/stream_k.cuh"
#include "sm80/write_eight.cuh"

namespace gm::block_scaled {

// MT: rows of x.  WN: warps.  SLOTS: of the ring.
template <typename Format, int MT, int WN, int SLOTS>
struct Product : Tile<Format, MT, WN, SLOTS>,
                 StreamK<Product<Format, MT, WN, SLOTS>, float4, WN, kWarpTiles, MT / 8> {
  using Tile = block_scaled::Tile<Format, MT, WN, SLOTS>;
  using Slot = typename Tile::Slot;
  using Tile::acc, Tile::KB, Tile::kColumns, Tile::kCopyRows, Tile::kRows, Tile::kX, Tile::lane, Tile::out,
      Tile::warp;
  const Params& p;

  __device__ __forceinline__ Product(const Params& p, uint8_t* smem) : Tile(smem), p(p) {}

  // A tile of y: its first row of x, and its first row of W.
  __device__ __forceinline__ int row0(int block) const { return block % p.high * MT; }
  __device__ __forceinline__ int n0(int block) const { return block / p.high * kRows; }

  // Copies this thread's chunk of every kCopyRows-th of COUNT rows; zeros past `rows`.
  template <int COUNT>
  __device__ __forceinline__ static void copy(uint32_t to, const uint8_t* from, int64_t step, int row,
                                              int rows, const uint8_t* valid) {
#pragma unroll
    for (int i = 0; i < (COUNT + kCopyRows - 1) / kCopyRows; ++i) {
      const bool there = rows > i * kCopyRows;
      if (COUNT % kCopyRows == 0 || row + i * kCopyRows < COUNT)
        cp_async_16(to + i * kCopyRows * KB, there ? from : valid, there ? 16 : 0);
      from += step;
    }
  }

  // The sums of a tile of y over slots [g0, g1).
  __device__ __forceinline__ void accumulate(int block, int g0, int g1) {
    const int row = Tile::copy_row(), m0 = row0(block), first = n0(block), t = threadIdx.x;
    const int place = Tile::copy_place(), column = g0 * KB + Tile::copy_chunk() * 16;
    const int64_t pitch = static_cast<int64_t>(p.groups) * KB, of_scales = p.groups * Slot::kScales;
    const uint8_t *x_from = p.x + (m0 + row) * pitch + column, *w_from = p.w + (first + row) * pitch + column;
    typename Tile::Scales scales{nullptr, nullptr, p.w_scale};
    if (t < MT && m0 + t < p.m) scales.of_x = p.x_scale + (m0 + t) * of_scales + g0 * Slot::kScales;
    if (first + t < p.n) scales.of_w = p.w_scale + (first + t) * of_scales + g0 * Slot::kScales;
    Tile::accumulate(g1 - g0, [&](uint32_t slot) {
      copy<MT>(slot + place, x_from, kCopyRows * pitch, row, p.m - m0 - row, p.w);
      copy<kRows>(slot + kX + place, w_from, kCopyRows * pitch, row, p.n - first - row, p.w);
      scales.copy(slot);
      x_from += KB, w_from += KB;
    });
  }

  // Rounds and writes the sums, 8 rows of x at a time, through shared memory: a lane writes 8 neighbouring columns of y.
  __device__ __forceinline__ void store(int block) {
    const int g = lane >> 2, t = lane & 3, n = n0(block) + warp * kWarpRows + t * 8, m0 = row0(block) + g;
    const int count = min(8, p.n - n);
    const float x_factor = p.x_factor ? *p.x_factor : 1.f;
    float factor[8], bias[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const bool here = i < count;
      factor[i] = here && p.w_factor ? __fmul_rn(x_factor, __ldg(p.w_factor + n + i)) : x_factor;
      bias[i] = here && p.bias ? widened(p.bias, n + i, p.half) : 0.f;
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      Tile::template transpose<kWarpTiles>(c);
      const int m = m0 + c * 8;
      float* sums = out + g * kOutStride + t * 8;
      if (m < p.m && count > 0)
        write_eight(p, sums, static_cast<int64_t>(m) * p.n + n, count,
                    [&](int i) { return __fadd_rn(__fmul_rn(sums[i], factor[i]), bias[i]); });
    }
  }
};

}  // namespace gm::block_scaled
#endif
