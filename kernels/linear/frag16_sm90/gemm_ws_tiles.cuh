// Parameters, shapes, tile scheduler and store of gemm_ws.
#pragma once
#include <cstdint>

#include "tile.h"

namespace gm {

struct GemmParams {
  const uint8_t* w;           // as in DecodeParams
  void* y;                    // [M, N], row stride N
  const void* bias;           // [rows of W] or null
  const void* residual;       // [M, N], row stride N, or null
  const float* row_scale;     // [rows of W], multiplies a row's sum before bias and residual; or null
  int m, n, groups, tiles16;  // n: columns of y; groups of 128 along K, tiles of 16 rows of W
  uint8_t* scratch;           // kFlagBytes of flags, zero between launches; then the partial sums of the CTAs
  int n_tiles, m_tiles, raster;  // tiles of Y; tiles along M of a raster band
  // Reciprocals (see quotient) of groups, raster * n_tiles, raster, m_tiles % raster.
  uint32_t by_groups, by_band, by_raster, by_rest;
  int shared_tiles;               // the first tiles are stream-K: their groups are divided evenly,
  int part_groups, longer_parts;  // part_groups per CTA, one more for the first longer_parts
  int log_split, scales_half;     // log2 of the CTAs of a cluster, which split K; scales are fp16, not bf16
  int vector;                     // rows of y and residual are 16-byte aligned
  int by_tma;                     // y is stored by TMA where a CTA stages its whole tile
  int lag;                        // groups by which the second half of the warpgroups is staggered
};

constexpr int kXSlotK = 64;
// Tiles of 16 rows of gate, and as many after them of the same columns of up, of a warpgroup.
constexpr int kGatedTiles = 2;
constexpr int kFlagBytes = 1 << 16;
constexpr int kSharedBytes = 226 << 10;  // dynamic shared memory that a CTA can have

// The most pairs of fragments, up to `most`, of which a whole number makes `pairs`.
constexpr int pairs_at_a_time(int pairs, int most) {
  int count = most < pairs ? most : pairs;
  while (pairs % count != 0) --count;
  return count;
}

// A CTA of MT rows of x, C blocks of 64 rows of W, and for each block SLICES warpgroups, which alternate groups of K.
// CTAS: per multiprocessor. XS, WS: slots of x and of weights; TILE: bytes of 16 rows of W.
template <int MT, int C, int SLICES, int CTAS, int XS, int WS, int TILE>
struct Cta {
  static constexpr int kGroups = C * SLICES, kThreads = kGroups * 128 + 128;
  static constexpr int kConsumerRegisters = kGroups == 4   ? 112
                                            : kGroups == 3 ? 160
                                            : CTAS == 2    ? 104
                                                           : 232,
                       kProducerRegisters = kGroups > 2 || CTAS == 2 ? 32 : 40;
  // Fragments of 8 rows of x that a warpgroup stores; pairs of them that a warp stores at a time, with 512 bytes of
  // staging each.
  static constexpr int kFragments = MT / 8 / SLICES,
                       kPairs = pairs_at_a_time(kFragments / 2, CTAS == 1 ? 5 : 2);
  // Whether the warpgroups after the first kLeading ones may stay behind them, so that their epilogues alternate.
  static constexpr bool kStaggered = C > 1 && SLICES == 1 && CTAS == 1;
  static constexpr int kLeading = (C + 1) / 2;
  // Pairs of fragments whose gate and up are exchanged at a time: as many as there are registers for.
  static constexpr int kGatedPairs = pairs_at_a_time(kPairs, kConsumerRegisters < 120 ? 2 : kPairs);
  // Bytes of the sums that slices exchange: those of 192 rows of x take the place of x, which leaves no other room.
  static constexpr bool kExchangesInX = SLICES > 1 && MT > 128;
  static constexpr int kExchange = kExchangesInX ? 0 : (SLICES - 1) * C * MT * 256;
  static constexpr int kRings = XS * MT * kXSlotK * 2 + WS * C * 4 * TILE + (XS + WS) * 16;  // with barriers
  // Whether a tile of y is staged whole, so that TMA stores it while the next one is multiplied: where there is room.
  static constexpr bool kWhole =
      SLICES == 1 && CTAS == 1 && MT >= 128 && kRings + C * MT * 128 <= kSharedBytes;
  static constexpr int kWarpStaging = 512 * (kWhole ? MT / 16 : kPairs),
                       kStaging = kGroups * 4 * kWarpStaging;
  static constexpr int kSharedMemory = kStaging + kRings + kExchange;
};

// n / d for 0 <= n < 2^31 by reciprocal(d): an eighth of the instructions of a division, on the critical path from a
// launch to its first copy.
constexpr uint32_t reciprocal(int d) { return d > 0 ? 0xffffffffu / static_cast<uint32_t>(d) : 0; }

}  // namespace gm

#ifdef __CUDACC__
#include "sm90/mma.cuh"
#include "sm90/store_16.cuh"
#include "sm90/tma.cuh"

namespace gm {

__device__ __forceinline__ int quotient(int n, int d, uint32_t reciprocal) {
  const int q = __umulhi(n, reciprocal);  // exact or one too small
  return q + (n - q * d >= d);
}

struct Tile {
  int n, m;
};

// Rasterization: `raster` tiles along M, then the next along N, so that concurrent tiles share rows of W and of x in
// the L2 cache.
__device__ __forceinline__ Tile tile_at(const GemmParams& p, int index) {
  const int band = p.raster * p.n_tiles, bands = quotient(index, band, p.by_band), first = bands * p.raster,
            rest = index - bands * band;
  const int left = p.m_tiles - first, height = min(p.raster, left),
            n = quotient(rest, height, left < p.raster ? p.by_rest : p.by_raster);
  return {n, first + rest - n * height};
}

// Persistent tile scheduler: first an equal part of the groups of the stream-K tiles, then whole tiles (Stream-K: Osama
// et al., PPoPP 2023). Parts are numbered in reverse order of launch, so that a CTA waits only for CTAs launched before
// it.
struct TileScheduler {
  int unit, tile;  // next group of the stream-K tiles, next whole tile
  __device__ __forceinline__ static int part() { return gridDim.x - 1 - blockIdx.x; }
  __device__ __forceinline__ static int begin(const GemmParams& p, int part) {
    return part * p.part_groups + min(part, p.longer_parts);
  }
  __device__ __forceinline__ TileScheduler(const GemmParams& p)
      : unit(begin(p, part())),
        tile(p.log_split > 0 ? blockIdx.x >> p.log_split : p.shared_tiles + blockIdx.x) {}
  // The next tile and its groups k .. k + count. Returns count, 0 at the end.
  __device__ __forceinline__ int next(const GemmParams& p, int& index, int& k) {
    const int left = begin(p, part() + 1) - unit;
    if (left > 0) {
      index = quotient(unit, p.groups, p.by_groups), k = unit - index * p.groups;
      const int count = min(p.groups - k, left);
      unit += count;
      return count;
    }
    const int tiles = p.n_tiles * p.m_tiles;
    if (tile >= tiles) return 0;
    index = tile, k = 0, tile += p.log_split > 0 ? tiles : gridDim.x;
    if (p.log_split == 0) return p.groups;
    const int rank = blockIdx.x & ((1 << p.log_split) - 1);  // the CTAs of a cluster split K
    k = (p.groups * rank) >> p.log_split;
    return ((p.groups * (rank + 1)) >> p.log_split) - k;
  }
};

// The first of the 16 rows of W that are tile `index` as CTAs count them, and the first of their columns of y.
struct RowTile {
  int column, row;
};
template <bool GATED>
__device__ __forceinline__ RowTile row_tile(const GemmParams& p, int index) {
  if constexpr (GATED) {
    const int column = (index / (2 * kGatedTiles) * kGatedTiles + index % kGatedTiles) * kTileRows;
    return {column, (index & kGatedTiles) ? p.n + column : column};
  } else {
    return {index * kTileRows, index * kTileRows};
  }
}

// Stores Y^T of 16 rows of W per warp and PAIRS * 16 rows of x, held as accumulator fragments, to y[m0 .. m_end, n0 ..].
// WARPS (1 or 4) call it together, for successive rows of W from n0 on, and store whole rows of theirs: 4 warps write lines
// of 128 bytes. All pairs of fragments are transposed through shared memory together, so that latencies overlap.
// staging: PAIRS * 512 bytes for each of the warps; barrier: a named one of 4 warps.
template <typename T, int PAIRS, int WARPS = 1>
__device__ __forceinline__ void store_fragments(const GemmParams& p, const float (&v)[PAIRS * 8],
                                                const float (&by)[2], const float (&bias)[2],
                                                uint32_t staging, int n0, int m0, int m_end,
                                                int barrier = 0) {
  static_assert(WARPS == 1 || WARPS == 4);
  constexpr int kChunks = WARPS * 2, kRowBytes = kChunks * 16, kPairBytes = 16 * kRowBytes;
  const int thread = threadIdx.x & (WARPS * 32 - 1), lane = thread & 31;
  const auto sync = [&] {
    if constexpr (WARPS == 1)
      __syncwarp();
    else
      bar_sync(barrier, WARPS * 32);
  };
  // Chunks of 16 bytes of a row of 16 n per warp, swapped among those of a row to avoid bank conflicts.
  const auto at_chunk = [&](int row, int chunk) {
    const int swapped = chunk ^ (WARPS == 1 ? row >> 2 & 1 : row & 7);
    return staging + row * kRowBytes + swapped * 16;
  };
  // Matrices of 8 x 8: (m low, n low), (m low, n high), (m high, n low), (m high, n high).
  const uint32_t matrix_row = at_chunk((lane >> 4) * 8 + (lane & 7), (thread >> 5) * 2 + (lane >> 3 & 1));
  const int m = m0 + thread / kChunks, n = n0 + thread % kChunks * 8;
  const uint32_t mine = at_chunk(thread / kChunks, thread % kChunks);
  const int64_t at = static_cast<int64_t>(m) * p.n + n;
  const int rows = n < p.n ? m_end - m : 0;  // pair i has this thread's 8 elements if i * 16 < rows
  sync();                                    // the previous call has read the staging
  if (p.residual != nullptr) {
    const T* from = static_cast<const T*>(p.residual) + at;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      if (i * 16 < rows && p.vector) {
        const uint4 r = *reinterpret_cast<const uint4*>(from + i * 16 * static_cast<int64_t>(p.n));
        st_shared(mine + i * kPairBytes, r);
      } else if (i * 16 < rows) {
#pragma unroll 1
        for (int j = 0; j < 8 && n + j < p.n; ++j)
          st_shared(mine + i * kPairBytes + j * 2,
                    reinterpret_cast<const uint16_t*>(from + i * 16 * static_cast<int64_t>(p.n))[j]);
      }
    }
    sync();
  }
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    float add[8] = {bias[0], bias[0], bias[1], bias[1], bias[0], bias[0], bias[1], bias[1]};
    if (p.residual != nullptr) {
      uint32_t got[4];
      ldmatrix_x4_trans(got, matrix_row + i * kPairBytes);
#pragma unroll
      for (int j = 0; j < 8; ++j) add[j] += Num<T>::to_float(reinterpret_cast<const T*>(&got[j >> 1])[j & 1]);
      __syncwarp();
    }
    uint32_t packed[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const T low = Num<T>::round(fmaf(v[i * 8 + 2 * j], by[j & 1], add[2 * j]));
      const T high = Num<T>::round(fmaf(v[i * 8 + 2 * j + 1], by[j & 1], add[2 * j + 1]));
      packed[j] = static_cast<uint32_t>(*reinterpret_cast<const uint16_t*>(&high)) << 16 |
                  *reinterpret_cast<const uint16_t*>(&low);
    }
    stmatrix_x4_trans(matrix_row + i * kPairBytes, packed);
  }
  sync();
  T* to = static_cast<T*>(p.y) + at;
  if (p.vector) {
    uint4 out[PAIRS];
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) out[i] = ld_shared<uint4>(mine + i * kPairBytes);
#pragma unroll
    for (int i = 0; i < PAIRS; ++i)
      if (i * 16 < rows) store_16(to + i * 16 * static_cast<int64_t>(p.n), out[i]);
    return;
  }
#pragma unroll 1
  for (int i = 0; i < PAIRS && i * 16 < rows; ++i) {
#pragma unroll 1
    for (int j = 0; j < 8 && n + j < p.n; ++j) {
      reinterpret_cast<uint16_t*>(to + i * 16 * static_cast<int64_t>(p.n))[j] =
          ld_shared<uint16_t>(mine + i * kPairBytes + j * 2);
    }
  }
}

// Stores Y^T of 64 rows of W and PAIRS * 16 rows of x by TMA, held as accumulator fragments of a warpgroup, which calls it
// together. The copy reads the staging, PAIRS * 2048 bytes in the 128-byte swizzle, after the call.
template <typename T, int PAIRS>
__device__ __forceinline__ void store_whole(const CUtensorMap& y_map, const float* v, const float (&by)[2],
                                            const float (&bias)[2], uint32_t staging, int n0, int m0,
                                            int barrier) {
  const int thread = threadIdx.x & 127, lane = thread & 31;
  const int row = (lane >> 4) * 8 + (lane & 7), chunk = (thread >> 5) * 2 + (lane >> 3 & 1);
  const uint32_t matrix_row = staging + row * 128 + (chunk ^ (row & 7)) * 16;
  if (thread == 0) tma_store_wait_read();  // the previous tile
  bar_sync(barrier, 128);
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    uint32_t packed[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const T low = Num<T>::round(fmaf(v[i * 8 + 2 * j], by[j & 1], bias[j & 1]));
      const T high = Num<T>::round(fmaf(v[i * 8 + 2 * j + 1], by[j & 1], bias[j & 1]));
      packed[j] = static_cast<uint32_t>(*reinterpret_cast<const uint16_t*>(&high)) << 16 |
                  *reinterpret_cast<const uint16_t*>(&low);
    }
    stmatrix_x4_trans(matrix_row + i * 2048, packed);
  }
  fence_proxy_async();
  bar_sync(barrier, 128);
  if (thread == 0) {
    tma_store(&y_map, staging, n0, m0);
    tma_store_commit();
  }
}

// silu(gate) * up of two elements by one reciprocal. A sigmoid below 2^-60 is taken for 2^-60, so that nothing overflows.
__device__ __forceinline__ void gate_two(float& a, float& b, float gate_a, float gate_b, float up_a,
                                         float up_b) {
  constexpr float kLog2e = 1.4426950408889634f;
  const float one_a = 1.f + exp2_approx(fminf(-kLog2e * gate_a, 60.f)),
              one_b = 1.f + exp2_approx(fminf(-kLog2e * gate_b, 60.f)), inverse = rcp_approx(one_a * one_b);
  a = gate_a * up_a * (inverse * one_b), b = gate_b * up_b * (inverse * one_a);
}

// Stores silu(gate) * up of PAIRS * 16 rows of x. Two warps call it: one has the sums of gate, the other those of the same
// columns of up, both as store_fragments takes them. Each sends half of its fragments of 8 rows of x through its staging, and
// finishes and stores the others. theirs: the other warp's staging; barrier: a named barrier of the two.
template <typename T, int PAIRS>
__device__ __forceinline__ void store_gated(const GemmParams& p, const float (&v)[PAIRS * 8],
                                            const float (&by)[2], const float (&bias)[2], uint32_t staging,
                                            uint32_t theirs, bool has_up, int barrier, int n0, int m0,
                                            int m_end) {
  constexpr int kMine = (PAIRS + 1) / 2;
  const uint32_t lane_at = (threadIdx.x & 31) * 16;
  float own[PAIRS * 4];
  __syncwarp();  // the previous call has read the staging
#pragma unroll
  for (int f = 0; f < PAIRS; ++f) {
    float sent[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float low = fmaf(v[f * 4 + i], by[i >> 1], bias[i >> 1]);
      const float high = fmaf(v[(PAIRS + f) * 4 + i], by[i >> 1], bias[i >> 1]);
      own[f * 4 + i] = has_up ? high : low, sent[i] = has_up ? low : high;
    }
    st_shared(staging + f * 512 + lane_at, make_float4(sent[0], sent[1], sent[2], sent[3]));
  }
  bar_sync(barrier, 64);
  float got[PAIRS][4];
#pragma unroll
  for (int f = 0; f < PAIRS; ++f) ld_shared(got[f], theirs + f * 512 + lane_at);
  bar_sync(barrier, 64);  // before either one stores through its staging
  float out[kMine * 8] = {};
#pragma unroll
  for (int f = 0; f < PAIRS; ++f)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // Of the same row of x, which no other row may change.
      const int a = f * 4 + i, b = a + 2;
      gate_two(out[a], out[b], has_up ? got[f][i] : own[a], has_up ? got[f][i + 2] : own[b],
               has_up ? own[a] : got[f][i], has_up ? own[b] : got[f][i + 2]);
    }
  constexpr float kOne[2] = {1.f, 1.f}, kNone[2] = {};
  const int first = m0 + (has_up ? PAIRS * 8 : 0);
  store_fragments<T, kMine>(p, out, kOne, kNone, staging, n0, first, min(m_end, first + PAIRS * 8));
}

}  // namespace gm
#endif
