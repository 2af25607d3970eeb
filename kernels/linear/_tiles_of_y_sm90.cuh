// The tiles of Y of the large-M kernels: their parameters, which tiles a CTA takes and when, and how a tile is written.
#pragma once
#include "_w4_frag16_sm90.cuh"

namespace gm {

struct TmaParams {
  const uint8_t* w;      // as in W4Params
  void* y;               // [M, N], row stride N
  const void* bias;      // [N] or null
  const void* residual;  // [M, N], row stride N, or null
  const float* row_scale;             // [N], multiplies a row's sum before bias and residual; or null
  int m, n, groups, tiles16;          // groups of 128 along K, tiles of 16 rows along N
  uint8_t* scratch;                   // kFlagBytes of flags, which are zero before and after; then partial sums of the CTAs
  int n_tiles, m_tiles, raster;       // tiles of Y; how many along M are neighbours in time
  int shared_tiles;                   // of the tiles, the first ones: their groups are dealt out evenly,
  int part_groups, longer_parts;      // this many to each CTA, and one more to the first ones
  int log_split, scales_half, vector; // CTAs of a cluster that share a tile; fp16 scales; rows of y and residual are 16-byte aligned
};

constexpr int kXSlotK = 64;
constexpr int kFlagBytes = 1 << 16;

constexpr int tma_smem(int mt, int c, int xs, int ws, int tile_bytes) {
  return xs * mt * kXSlotK * 2 + ws * c * 4 * tile_bytes + c * 4 * 1024 + (xs + ws) * 16;
}

}  // namespace gm

#ifdef __CUDACC__
namespace gm {

struct Tile {
  int n, m;
};

// Tiles in the order of time: `raster` tiles along M, then the next along N, so that what runs together shares rows of W and of x.
__device__ __forceinline__ Tile tile_at(const TmaParams& p, int index) {
  const int band = p.raster * p.n_tiles, first = index / band * p.raster, rest = index % band;
  const int height = min(p.raster, p.m_tiles - first);
  return {rest / height, first + rest % height};
}

// What a CTA does, in order: its equal part of the groups of the shared tiles, laid end to end, then whole tiles. (Stream-K: Osama et al.,
// PPoPP 2023.) Parts are numbered against the order of launch, so that a CTA waits only for sums of CTAs launched before it.
struct Walk {
  int unit, tile;  // the next group of the shared tiles, the next whole tile
  __device__ __forceinline__ static int part() { return gridDim.x - 1 - blockIdx.x; }
  __device__ __forceinline__ static int begin(const TmaParams& p, int part) { return part * p.part_groups + min(part, p.longer_parts); }
  __device__ __forceinline__ Walk(const TmaParams& p)
      : unit(begin(p, part())), tile(p.log_split > 0 ? blockIdx.x >> p.log_split : p.shared_tiles + blockIdx.x) {}
  // The next tile, and the groups k .. k + count of it; count = 0 at the end.
  __device__ __forceinline__ int next(const TmaParams& p, int& index, int& k) {
    const int left = begin(p, part() + 1) - unit;
    if (left > 0) {
      index = unit / p.groups, k = unit - index * p.groups;
      const int count = min(p.groups - k, left);
      unit += count;
      return count;
    }
    const int tiles = p.n_tiles * p.m_tiles;
    if (tile >= tiles) return 0;
    index = tile, k = 0, tile += p.log_split > 0 ? tiles : gridDim.x;
    if (p.log_split == 0) return p.groups;
    const int rank = blockIdx.x & ((1 << p.log_split) - 1);  // the CTAs of a cluster take turns along K
    k = (p.groups * rank) >> p.log_split;
    return ((p.groups * (rank + 1)) >> p.log_split) - k;
  }
};

// Writes 16 rows of W x 16 rows of x of Y^T, held as two accumulator fragments, to y[m0 .. m_end), n0 .. n0 + 16).
template <typename T>
__device__ __forceinline__ void store_fragments(const TmaParams& p, const float (&v)[8], const float (&by)[2], const float (&bias)[2],
                                                uint32_t staging, int n0, int m0, int m_end) {
  const int lane = threadIdx.x & 31;
  // Matrices of 8 x 8: (m low, n low), (m low, n high), (m high, n low), (m high, n high); a row of 16 n is 32 bytes, its halves
  // swapped in every second four rows so that no bank is met twice.
  const int row = (lane >> 4) * 8 + (lane & 7), half = lane >> 3 & 1;
  const uint32_t matrix_row = staging + row * 32 + ((half ^ (row >> 2 & 1)) << 4);
  const int m = m0 + (lane >> 1), n = n0 + (lane & 1) * 8;
  const uint32_t mine = staging + (lane >> 1) * 32 + (((lane & 1) ^ (lane >> 3 & 1)) << 4);
  float add[8] = {bias[0], bias[0], bias[1], bias[1], bias[0], bias[0], bias[1], bias[1]};
  const bool inside = m < m_end && n < p.n;
  const int64_t at = static_cast<int64_t>(m) * p.n + n;
  if (p.residual != nullptr) {
    const T* from = static_cast<const T*>(p.residual) + at;
    if (inside && p.vector) {
      const uint4 r = *reinterpret_cast<const uint4*>(from);
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(mine), "r"(r.x), "r"(r.y), "r"(r.z), "r"(r.w) : "memory");
    } else if (inside) {
#pragma unroll 1
      for (int i = 0; i < 8 && n + i < p.n; ++i)
        asm volatile("st.shared.b16 [%0], %1;" ::"r"(mine + i * 2), "h"(reinterpret_cast<const uint16_t*>(from)[i]) : "memory");
    }
    __syncwarp();
    uint32_t got[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(got[0]), "=r"(got[1]), "=r"(got[2]), "=r"(got[3])
                 : "r"(matrix_row)
                 : "memory");
#pragma unroll
    for (int i = 0; i < 8; ++i) add[i] += Num<T>::wide(reinterpret_cast<const T*>(&got[i >> 1])[i & 1]);
    __syncwarp();
  }
  uint32_t packed[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const T low = Num<T>::round(fmaf(v[2 * i], by[i & 1], add[2 * i])), high = Num<T>::round(fmaf(v[2 * i + 1], by[i & 1], add[2 * i + 1]));
    packed[i] = static_cast<uint32_t>(*reinterpret_cast<const uint16_t*>(&high)) << 16 | *reinterpret_cast<const uint16_t*>(&low);
  }
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(matrix_row), "r"(packed[0]), "r"(packed[1]),
               "r"(packed[2]), "r"(packed[3])
               : "memory");
  __syncwarp();
  T* to = static_cast<T*>(p.y) + at;
  if (inside && p.vector) {
    uint4 out;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w) : "r"(mine) : "memory");
    *reinterpret_cast<uint4*>(to) = out;
  } else if (inside) {
#pragma unroll 1
    for (int i = 0; i < 8 && n + i < p.n; ++i) {
      uint16_t v;
      asm volatile("ld.shared.b16 %0, [%1];" : "=h"(v) : "r"(mine + i * 2) : "memory");
      reinterpret_cast<uint16_t*>(to)[i] = v;
    }
  }
}

}  // namespace gm
#endif
