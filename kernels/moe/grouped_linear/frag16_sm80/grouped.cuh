// Grouped linear for sm_80 and newer: y[p, :] = x[row of p, :] · W[expert of p]^T, rows of y sorted by expert, by the tiles
// of the schedule gemm (linear/frag16_sm80/gemm_tile.cuh).
//
//  - A tile of y has MT rows of one expert. How many tiles there are depends on the offsets of the experts, which are on
//    the device: every CTA makes the list of tiles from them, and walks over its part.
//  - cp.async gathers the rows of x, so that x needs no order.
//  - gated: a warp owns a tile of gate and the same tile of up, so that a lane has both values of a column.
//  - Tiles of one expert that share rows of W follow each other, so that W is read from memory once.
#pragma once
#include "linear/frag16_sm80/gemm_tile.cuh"
#include "moe/swiglu.cuh"

namespace gm {

struct GroupedParams {
  const uint8_t* w;        // tiles of all experts, `expert_bytes` apart, each as GemmParams::w
  const void* x;           // rows that `permutation` gathers, 16-byte aligned
  void* y;                 // [rows, out_n], row stride out_n
  const void* bias;        // [experts, n] or null
  const float* row_scale;  // [experts, n], multiplies a row's sum before the bias; or null
  const int* offsets;      // [experts + 1]: rows of y of expert e are offsets[e] .. offsets[e + 1]
  const int* permutation;  // [rows]: row p of y is of row permutation[p] / top_k of x; null: of row p
  int64_t expert_bytes;
  uint32_t x_chunks;                       // 16-byte chunks from a row of x to the next
  int rows, experts, n, k, groups, tiles;  // n, tiles: rows of an expert's W, tiles of 16 of them
  int out_n;                               // columns of y: n, or half of it with `gated`
  int blocks;                              // tiles of y along N
  int top_k;
  int gated, clamp;          // silu(first half of the rows of W) * second half; its clamped form
  float alpha, limit;        // of the clamped form
  int scales_half, vectors;  // 16-bit scales are fp16, not bf16; rows of y are 16-byte aligned
};

// Bytes of the list of tiles, which is after the rings in shared memory.
constexpr int list_bytes(int experts) { return 8 * (experts + 1); }

}  // namespace gm

#ifdef __CUDACC__
namespace gm {

template <typename W, int MT, int WN, int NX, int NW>
struct Grouped : GemmTile<W, MT, WN, NX, NW> {
  using Tile = GemmTile<W, MT, WN, NX, NW>;
  using T = typename Tile::T;
  using Tile::acc, Tile::kColumns, Tile::kThreads, Tile::kXRows, Tile::lane, Tile::out, Tile::warp;
  const GroupedParams& p;
  int *first, *starts;   // [experts + 1]: tiles along M of the experts before, and the first row of y
  int expert, row, end;  // of the tile of y: its expert and first row; the end of the expert's rows
  int tile[kWarpTiles],
      last_tile;  // the warp's tiles of W; tiles of which there are values: all, or those of gate

  __device__ __forceinline__ Grouped(const GroupedParams& p, uint8_t* smem)
      : Tile(smem, p.scales_half), p(p), last_tile(p.gated ? p.tiles / 2 : p.tiles) {
    first = reinterpret_cast<int*>(smem + NX * Tile::kXSlot + NW * Tile::kWSlot);
    starts = first + p.experts + 1;
  }

  // Makes the list of tiles; by all threads.
  __device__ __forceinline__ void list() {
    for (int e = threadIdx.x; e <= p.experts; e += kThreads) starts[e] = p.offsets[e];
    __syncthreads();
    if (warp == 0) {
      int total = 0;
      for (int base = 0; base < p.experts; base += 32) {
        const int e = base + lane;
        const int mine = e < p.experts ? (starts[e + 1] - starts[e] + MT - 1) / MT : 0;
        int sum = mine;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
          const int before = __shfl_up_sync(0xffffffffu, sum, step);
          if (lane >= step) sum += before;
        }
        if (e < p.experts) first[e] = total + sum - mine;
        total += __shfl_sync(0xffffffffu, sum, 31);
      }
      if (lane == 0) first[p.experts] = total;
    }
    __syncthreads();
  }

  // Goes to a tile of y.
  __device__ __forceinline__ void enter(int index) {
    const int place = index / p.blocks;
    int after = p.experts;  // the expert is the last whose first tile is not behind `place`
    expert = 0;
    while (after - expert > 1) {
      const int middle = (expert + after) / 2;
      (first[middle] <= place ? expert : after) = middle;
    }
    const int high = first[expert + 1] - first[expert], rest = index - first[expert] * p.blocks,
              block = rest / high;
    row = starts[expert] + (rest - block * high) * MT, end = starts[expert + 1];
    if (p.gated)
      tile[0] = block * WN + warp, tile[1] = tile[0] + last_tile;
    else
      tile[0] = (block * WN + warp) * kWarpTiles, tile[1] = tile[0] + 1;
  }
  __device__ __forceinline__ bool has(int r) const { return (p.gated ? tile[0] : tile[r]) < last_tile; }

  // Copies 64 k of MT rows of x to a slot, zeros past the expert's rows and past K. from: this thread's chunk of row 0
  // of x; source: its rows of x in chunks from there; rows: how many there are from its first row on.
  __device__ __forceinline__ void copy_x(uint32_t slot, const char* from,
                                         const uint32_t (&source)[MT / kXRows], int rows, int columns) const {
    const uint32_t to = slot + Tile::place_in_x();
#pragma unroll
    for (int i = 0; i < MT / kXRows; ++i) {
      const bool there = columns > 0 && rows > i * kXRows;
      cp_async_16(to + i * kXRows * kXBytes, there ? from + static_cast<uint64_t>(source[i]) * 16 : p.x,
                  there ? 16 : 0);
    }
  }
  // Copies a tile of W to its place in a slot.
  __device__ __forceinline__ void copy_tile(uint32_t to, const uint8_t* from) const {
#pragma unroll
    for (int i = 0; i < W::kBytes; i += 512)
      if (i + lane * 16 < W::kBytes) cp_async_16(to + i + lane * 16, from + i + lane * 16);
  }

  // The sums of the tile of y.
  __device__ __forceinline__ void accumulate() {
    const uint8_t* from[kWarpTiles];
    int step[kWarpTiles];  // bytes from a group to the next
#pragma unroll
    for (int r = 0; r < kWarpTiles; ++r) {
      const int base = tile[r] & ~3;
      step[r] = min(4, p.tiles - base) * W::kBytes;
      from[r] = p.w + expert * p.expert_bytes +
                (static_cast<int64_t>(base) * p.groups + (tile[r] - base)) * W::kBytes;
    }
    const int mine = row + (threadIdx.x >> 3), rows = end - mine;
    uint32_t source[MT / kXRows];
#pragma unroll
    for (int i = 0; i < MT / kXRows; ++i) {
      const int at = rows > i * kXRows ? mine + i * kXRows : row;
      source[i] = (p.permutation ? p.permutation[at] / p.top_k : at) * p.x_chunks;
    }
    const char* x_from = static_cast<const char*>(p.x) + (threadIdx.x & 7) * 16;
    int columns = p.k - (threadIdx.x & 7) * 8;
    Tile::accumulate(
        p.groups,
        [&](uint32_t slot) {
#pragma unroll
          for (int r = 0; r < kWarpTiles; ++r) {
            if (has(r)) copy_tile(slot + r * W::kBytes, from[r]);
            from[r] += step[r];
          }
        },
        [&](uint32_t slot) {
          copy_x(slot, x_from, source, rows, columns);
          x_from += kXBytes, columns -= 64;
        });
  }

  // Scales the sums, adds biases, and with `gated` puts the activations into the sums of the first tile.
  __device__ __forceinline__ void finish() {
    float by[kWarpTiles][2], plus[kWarpTiles][2];  // of rows g and g + 8 of each tile of W
#pragma unroll
    for (int r = 0; r < kWarpTiles; ++r)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int n = tile[r] * kTileRows + (lane >> 2) + h * 8;
        const int64_t at = static_cast<int64_t>(expert) * p.n + n;
        const bool there = has(r) && n < p.n;
        by[r][h] = p.row_scale && there ? p.row_scale[at] : 1.f;
        plus[r][h] = p.bias && there ? Num<T>::to_float(static_cast<const T*>(p.bias)[at]) : 0.f;
      }
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int r = 0; r < kWarpTiles; ++r)
          acc[r][c][i] = acc[r][c][i] * W::kFactor * by[r][i >> 1] + plus[r][i >> 1];
        if (p.gated) acc[0][c][i] = swiglu(p, acc[0][c][i], acc[1][c][i]);
      }
  }

  // Rounds and writes the first TILES tiles' values, 8 rows of y at a time, through shared memory: a lane writes
  // 4 TILES neighbouring columns.
  template <int TILES>
  __device__ __forceinline__ void store() {
    constexpr int kCount = 4 * TILES;
    const int g = lane >> 2, t = lane & 3, n = tile[0] * kTileRows + t * kCount;
    const float* from = out + g * kOutStride + t * kCount;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int m = row + c * 8 + g;
      if (m - g < end) Tile::template transpose<TILES>(c);
      if (m >= end || n >= p.out_n) continue;
      T* to = static_cast<T*>(p.y) + static_cast<int64_t>(m) * p.out_n + n;
      if (p.vectors && n + kCount <= p.out_n) {
        uint32_t words[kCount / 2];
#pragma unroll
        for (int i = 0; i < kCount; i += 2) words[i / 2] = packed<T>(from[i], from[i + 1]);
#pragma unroll
        for (int i = 0; i < kCount / 2; i += 2)
          *reinterpret_cast<uint2*>(to + 2 * i) = make_uint2(words[i], words[i + 1]);
      } else {
#pragma unroll 1
        for (int i = 0; i < min(kCount, p.out_n - n); ++i) to[i] = Num<T>::round(from[i]);
      }
    }
  }

  __device__ __forceinline__ void run() {
    list();
    const int tiles = first[p.experts] * p.blocks;
#pragma unroll 1
    for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
      enter(index);
      accumulate();
      finish();
      if (p.gated)
        store<1>();
      else
        store<kWarpTiles>();
    }
    // Rows of no expert are 0.
#pragma unroll 1
    for (int64_t m = starts[p.experts] + blockIdx.x; m < p.rows; m += gridDim.x)
      for (int n = threadIdx.x; n < p.out_n; n += kThreads)
        static_cast<T*>(p.y)[m * p.out_n + n] = Num<T>::round(0.f);
  }
};

}  // namespace gm
#endif
