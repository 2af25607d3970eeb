// Schedule gemm: y[M, N] = x[M, K] · W[N, K]^T at any M, float32 accumulation, for sm_80 and newer; gemm_tile.cuh has a
// tile of y.
//
// CTAs are persistent. The tiles of y that fill whole waves have a CTA each; the rest is dealt out along K in equal
// parts (stream-K; Osama et al., 2023). Partial sums go to global memory, and the last CTA of a tile to arrive adds
// them in the order of K: no CTA waits for another, and results are bitwise repeatable.
#pragma once
#include "gemm_tile.cuh"

namespace gm {

struct GemmParams {
  const uint8_t* w;  // packed weights: blocks of 64 rows, [block][K / 128][tiles of the block <= 4][kBytes]
  const void* x;     // [M, K], rows ldx elements apart and 16-byte aligned
  void* y;           // [M, N], row stride N
  const void* bias;  // [N] or null
  const void* residual;        // [M, N], row stride N, or null
  const float* row_scale;      // [N], multiplies a row's sum before bias and residual; or null
  uint32_t* counters;          // [tiles of y that CTAs share], zero before and after
  float* sums;                 // [CTAs][2][warps][tiles of 16][MT / 8][32 lanes][4]
  int64_t ldx, x_step;         // x_step: bytes of the rows of x that a CTA copies at a time
  int m, n, k, tiles, groups;  // tiles of 16 rows of W, groups of 128 k
  int high, blocks, whole;     // tiles of y along M, all of them, and those that are not shared
  int scales_half;             // 16-bit scales are fp16, not bf16
  int vectors;                 // rows of y and residual are 16-byte aligned
};

}  // namespace gm

#ifdef __CUDACC__
namespace gm {

template <typename W, int MT, int WN, int NX, int NW>
struct Gemm : GemmTile<W, MT, WN, NX, NW> {
  using Tile = GemmTile<W, MT, WN, NX, NW>;
  using T = typename Tile::T;
  using Tile::acc, Tile::kColumns, Tile::kXRows, Tile::lane, Tile::out, Tile::warp;
  const GemmParams& p;

  __device__ __forceinline__ Gemm(const GemmParams& p, uint8_t* smem) : Tile(smem, p.scales_half), p(p) {}

  // The tile of y: its first row of x, and the warp's first tile of W.
  __device__ __forceinline__ int row0(int block) const { return block % p.high * MT; }
  __device__ __forceinline__ int tile0(int block) const { return (block / p.high * WN + warp) * kWarpTiles; }

  // Copies x[:, k0 : k0 + 64] of MT rows to a slot, zeros past M and K. from: this thread's chunk of its first row;
  // rows: how many there are from that row on; columns: how many from that chunk on.
  __device__ __forceinline__ void copy_x(uint32_t slot, const char* from, int rows, int columns) const {
    const int bytes = max(0, min(16, 2 * columns));
    const uint32_t to = slot + Tile::place_in_x();
#pragma unroll
    for (int i = 0; i < MT / kXRows; ++i) {
      const bool there = bytes && rows > i * kXRows;
      cp_async_16(to + i * kXRows * kXBytes, there ? from : p.x, there ? bytes : 0);
      from += p.x_step;
    }
  }
  // Copies the warp's tiles of a group; those past the last one are left as they are, and their sums never stored.
  __device__ __forceinline__ void copy_w(uint32_t slot, const uint8_t* from, int bytes) const {
#pragma unroll
    for (int i = 0; i < Tile::kWarpBytes; i += 512)
      if (i + lane * 16 < bytes) cp_async_16(slot + i + lane * 16, from + i + lane * 16);
  }

  // The sums of a tile of y over groups [g0, g1).
  __device__ __forceinline__ void accumulate(int block, int g0, int g1) {
    const int tile = tile0(block), base = tile & ~3, in_block = min(4, p.tiles - base);
    const int mine = max(0, min(kWarpTiles, p.tiles - tile)) * W::kBytes;
    const uint8_t* from =
        p.w + (static_cast<int64_t>(base) * p.groups + static_cast<int64_t>(g0) * in_block + (tile - base)) *
                  W::kBytes;
    const int row = row0(block) + (threadIdx.x >> 3), column = g0 * kTileK + (threadIdx.x & 7) * 8;
    const char* x_from = static_cast<const char*>(p.x) + (row * p.ldx + column) * 2;
    const int rows = p.m - row;
    int columns = min(p.k, g1 * kTileK) - column;
    Tile::accumulate(
        g1 - g0, [&](uint32_t slot) { copy_w(slot, from, mine), from += in_block * W::kBytes; },
        [&](uint32_t slot) {
          copy_x(slot, x_from, rows, columns);
          x_from += kXBytes, columns -= 64;
        });
  }

  // Rounds and writes the sums, 8 rows of x at a time, through shared memory: a lane writes 8 neighbouring columns of y.
  __device__ __forceinline__ void store(int block) {
    const int g = lane >> 2, t = lane & 3, n = tile0(block) * kTileRows + t * 8, m0 = row0(block) + g;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      Tile::template transpose<kWarpTiles>(c);
      const int m = m0 + c * 8;
      if (m >= p.m || n >= p.n) continue;
      const float* from = out + g * kOutStride + t * 8;
      if (p.vectors && n + 8 <= p.n) {
        write_eight(from, m, n);
      } else {
#pragma unroll 1
        for (int i = 0; i < min(8, p.n - n); ++i) {
          const int64_t at = static_cast<int64_t>(m) * p.n + n + i;
          const float residual = p.residual ? Num<T>::to_float(static_cast<const T*>(p.residual)[at]) : 0.f;
          static_cast<T*>(p.y)[at] = Num<T>::round(finished(from[i], n + i) + residual);
        }
      }
    }
  }
  // A sum of column n, scaled, plus its bias.
  __device__ __forceinline__ float finished(float sum, int n) const {
    sum *= W::kFactor;
    if (p.row_scale) sum *= p.row_scale[n];
    return p.bias ? sum + Num<T>::to_float(static_cast<const T*>(p.bias)[n]) : sum;
  }
  // Writes y[m, n : n + 8].
  __device__ __forceinline__ void write_eight(const float* from, int m, int n) const {
    const int64_t at = static_cast<int64_t>(m) * p.n + n;
    const float4 low = reinterpret_cast<const float4*>(from)[0],
                 high = reinterpret_cast<const float4*>(from)[1];
    float v[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = finished(v[i], n + i);
    if (p.residual) {
      const uint4 words = *reinterpret_cast<const uint4*>(static_cast<const T*>(p.residual) + at);
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] += Num<T>::to_float(reinterpret_cast<const T*>(&words)[i]);
    }
    *reinterpret_cast<uint4*>(static_cast<T*>(p.y) + at) = make_uint4(
        packed<T>(v[0], v[1]), packed<T>(v[2], v[3]), packed<T>(v[4], v[5]), packed<T>(v[6], v[7]));
  }

  // Where CTA `cta` begins in the shared tiles, in groups, and which CTA has a group of them.
  __device__ __forceinline__ int64_t shared_groups() const {
    return static_cast<int64_t>(p.blocks - p.whole) * p.groups;
  }
  __device__ __forceinline__ int begin(int cta) const { return shared_groups() * cta / gridDim.x; }
  __device__ __forceinline__ int owner(int group) const {
    return ((static_cast<int64_t>(group) + 1) * gridDim.x - 1) / shared_groups();
  }
  // The sums of a CTA for a shared tile: a CTA has parts of two at most that are not whole.
  __device__ __forceinline__ float4* sums_of(int cta, int shared) const {
    constexpr int kElements = WN * kWarpTiles * kColumns * 32;
    const int second = begin(cta) < shared * p.groups;
    return reinterpret_cast<float4*>(p.sums) + (static_cast<int64_t>(cta) * 2 + second) * kElements +
           warp * (kWarpTiles * kColumns * 32) + lane;
  }
  // Adds this CTA's part of a shared tile; the last CTA to arrive gets the sums of all, and true.
  __device__ __forceinline__ bool meet(int shared) {
    __shared__ int is_last;
    float4* to = sums_of(blockIdx.x, shared);
#pragma unroll
    for (int r = 0; r < kWarpTiles; ++r)
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        __stcg(to + (r * kColumns + c) * 32,
               make_float4(acc[r][c][0], acc[r][c][1], acc[r][c][2], acc[r][c][3]));
    const int first = owner(shared * p.groups), last = owner((shared + 1) * p.groups - 1);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      is_last = atomicAdd(p.counters + shared, 1u) == static_cast<uint32_t>(last - first);
      if (is_last) p.counters[shared] = 0;
    }
    __syncthreads();
    if (!is_last) return false;
    __threadfence();
    Tile::clear();
#pragma unroll 1
    for (int cta = first; cta <= last; ++cta) {
      const float4* from = sums_of(cta, shared);
#pragma unroll
      for (int r = 0; r < kWarpTiles; ++r)
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          if (c % 8 == 0) __syncwarp();  // bounds how many loads are in flight, and so registers
          const float4 v = __ldcg(from + (r * kColumns + c) * 32);
          float (&sum)[4] = acc[r][c];
          sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
        }
    }
    return true;
  }

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (int block = blockIdx.x; block < p.whole; block += gridDim.x)
      accumulate(block, 0, p.groups), store(block);
#pragma unroll 1
    for (int at = begin(blockIdx.x); at < begin(blockIdx.x + 1);) {
      const int shared = at / p.groups, g0 = at - shared * p.groups,
                g1 = min(p.groups, begin(blockIdx.x + 1) - shared * p.groups);
      accumulate(p.whole + shared, g0, g1);
      at += g1 - g0;
      if (g1 - g0 == p.groups || meet(shared)) store(p.whole + shared);
    }
  }
};

}  // namespace gm
#endif
