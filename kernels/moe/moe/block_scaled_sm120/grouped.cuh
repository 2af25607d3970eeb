// y[p, :] = x[row of p, :] · W[expert of p]^T on block-scaled codes, rows of y sorted by expert, for sm_120 and sm_121, by the tiles of
// linear/block_scaled_sm120/tile.cuh.
//
//  - cp.async gathers rows of codes and of scales, so that x is quantized once for all of its experts, in its own order.
//  - gated: one of a warp's two tiles of 16 rows of W is of gate, the other the same of up, so that a lane has both values of a column.
//  - Tiles of one expert that share rows of W follow each other, so that W is read from memory once.
#pragma once
#include "expert_tiles.cuh"
#include "linear/block_scaled_sm120/tile.cuh"
#include "moe/swiglu.cuh"
#include "params.h"

#ifdef __CUDACC__
#include "sm80/write_eight.cuh"

namespace gm::block_scaled {

// MT: rows of x.  WN: warps.  SLOTS: of the ring.
template <typename Format, int MT, int WN, int SLOTS>
struct Grouped : Tile<Format, MT, WN, SLOTS> {
  using Tile = block_scaled::Tile<Format, MT, WN, SLOTS>;
  using Slot = typename Tile::Slot;
  using Tile::acc, Tile::KB, Tile::kColumns, Tile::kCopyRows, Tile::kRows, Tile::kThreads, Tile::kX,
      Tile::lane, Tile::out, Tile::warp;
  static constexpr uint32_t kNone = ~0u;  // in place of a row that is not there

  const ExpertParams& p;
  const ExpertTiles tiles;
  float* factors;  // [MT], of the rows of x
  int expert, row, end,
      block;  // of the tile of y: expert, first row, the end of the expert's rows; place along W

  __device__ __forceinline__ Grouped(const ExpertParams& p, uint8_t* smem)
      : Tile(smem), p(p), tiles(tiles_at(p, smem)) {
    factors = reinterpret_cast<float*>(tiles.starts + p.experts + 1);
  }
  __device__ __forceinline__ static ExpertTiles tiles_at(const ExpertParams& p, uint8_t* smem) {
    int* first = reinterpret_cast<int*>(smem + SLOTS * Tile::kSlot);
    return {p.experts, first, first + p.experts + 1};
  }

  // Goes to a tile of y.
  __device__ __forceinline__ void enter(int index) {
    expert = tiles.expert_of(index / p.blocks);
    const int first = tiles.first[expert], high = tiles.first[expert + 1] - first,
              rest = index - first * p.blocks;
    block = rest / high;
    row = tiles.starts[expert] + (rest - block * high) * MT, end = tiles.starts[expert + 1];
  }

  // The row of x that row `at` of the tile is of; kNone past the expert's rows.
  __device__ __forceinline__ uint32_t row_of_x(int at) const {
    if (row + at >= end) return kNone;
    return p.permutation ? p.permutation[row + at] / p.top_k : row + at;
  }
  // The row of all experts' W that row `at` of the CTA's rows is; kNone past the expert's rows.
  __device__ __forceinline__ uint32_t row_of_w(int at) const {
    int n = block * kRows + at, up = 0;
    if (p.gated) n = (block * WN + at / 32) * 16 + at % 16, up = at / 16 % 2 * p.out_n;
    return n < p.out_n ? expert * p.n + n + up : kNone;
  }

  // Copies this thread's chunk of every kCopyRows-th of COUNT rows; zeros for those that are not there.
  template <int COUNT, int COPIES>
  __device__ __forceinline__ static void copy(uint32_t to, const uint8_t* from, int64_t pitch,
                                              const uint32_t (&rows)[COPIES], const uint8_t* valid) {
#pragma unroll
    for (int i = 0; i < COPIES; ++i) {
      const bool there = rows[i] != kNone;
      if (COUNT % kCopyRows == 0 || Tile::copy_row() + i * kCopyRows < COUNT)
        cp_async_16(to + i * kCopyRows * KB, there ? from + rows[i] * pitch : valid, there ? 16 : 0);
    }
  }

  // The sums of the tile of y.
  __device__ __forceinline__ void accumulate() {
    constexpr int kXCopies = (MT + kCopyRows - 1) / kCopyRows, kWCopies = kRows / kCopyRows;
    const int place = Tile::copy_place(), t = threadIdx.x;
    const int64_t pitch = static_cast<int64_t>(p.slots) * KB, of_scales = p.slots * Slot::kScales;
    uint32_t x_rows[kXCopies], w_rows[kWCopies];
#pragma unroll
    for (int i = 0; i < kXCopies; ++i) x_rows[i] = row_of_x(Tile::copy_row() + i * kCopyRows);
#pragma unroll
    for (int i = 0; i < kWCopies; ++i) w_rows[i] = row_of_w(Tile::copy_row() + i * kCopyRows);
    const uint8_t *x_from = p.x + Tile::copy_chunk() * 16, *w_from = p.w + Tile::copy_chunk() * 16;
    const uint32_t x_row = t < MT ? row_of_x(t) : kNone, w_row = row_of_w(t);  // whose scales it copies
    typename Tile::Scales scales{nullptr, nullptr, p.w_scale};
    if (x_row != kNone) scales.of_x = p.x_scale + x_row * of_scales;
    if (w_row != kNone) scales.of_w = p.w_scale + w_row * of_scales;
    __syncthreads();  // every warp has read the factors of the tile before
    if (t < MT) factors[t] = x_row != kNone && p.x_factor ? p.x_factor[x_row] : 1.f;
    Tile::accumulate(p.slots, [&](uint32_t slot) {
      copy<MT>(slot + place, x_from, pitch, x_rows, p.w);
      copy<kRows>(slot + kX + place, w_from, pitch, w_rows, p.w);
      scales.copy(slot);
      x_from += KB, w_from += KB;
    });
  }

  // Scales the sums, adds biases, and with `gated` puts the activations into the sums of the first tile.
  __device__ __forceinline__ void finish() {
    const int g = lane >> 2, t = lane & 3;
    float by[kWarpTiles][2], plus[kWarpTiles][2];  // of rows g and g + 8 of each tile of W
#pragma unroll
    for (int r = 0; r < kWarpTiles; ++r)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t at = row_of_w(warp * kWarpRows + r * 16 + g + h * 8);
        const bool there = at != kNone;
        by[r][h] = there && p.w_factor ? p.w_factor[at] : 1.f;
        plus[r][h] = there && p.bias ? widened(p.bias, at, p.half) : 0.f;
      }
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float factor = factors[c * 8 + 2 * t + (i & 1)];
#pragma unroll
        for (int r = 0; r < kWarpTiles; ++r)
          acc[r][c][i] =
              __fadd_rn(__fmul_rn(acc[r][c][i], __fmul_rn(factor, by[r][i >> 1])), plus[r][i >> 1]);
        if (p.gated) acc[0][c][i] = swiglu(p, acc[0][c][i], acc[1][c][i]);
      }
  }

  // Rounds and writes the first TILES tiles' values, 8 rows of y at a time, through shared memory: a lane writes
  // 4 TILES neighbouring columns.
  template <int TILES>
  __device__ __forceinline__ void store() {
    constexpr int kCount = 4 * TILES;
    const int g = lane >> 2, t = lane & 3, n = (block * WN + warp) * TILES * 16 + t * kCount;
    const float* from = out + g * kOutStride + t * kCount;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      Tile::template transpose<TILES>(c);
      const int m = row + c * 8 + g;
      if (m >= end || n >= p.out_n) continue;  // out_n is a multiple of 8
      uint16_t* to = static_cast<uint16_t*>(p.y) + static_cast<int64_t>(m) * p.out_n + n;
#pragma unroll
      for (int i = 0; i < kCount; i += 4)
        *reinterpret_cast<uint2*>(to + i) =
            make_uint2(rounded(from[i], from[i + 1], p.half), rounded(from[i + 2], from[i + 3], p.half));
    }
  }

  __device__ __forceinline__ void run() {
    tiles.template list<MT, kThreads>(p.offsets);
    const int all = tiles.count() * p.blocks;
#pragma unroll 1
    for (int index = blockIdx.x; index < all; index += gridDim.x) {
      enter(index);
      accumulate();
      finish();
      if (p.gated)
        store<1>();
      else
        store<kWarpTiles>();
    }
  }
};

}  // namespace gm::block_scaled
#endif
