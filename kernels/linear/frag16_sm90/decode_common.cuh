// Common parts of the decode kernels: parameters, x in shared memory, products, and the epilogue that reduces
// partial sums.
//
// Tiles of W in shared memory are the A operand of mma.m16n8k16, x the B operand, so that the 16-wide side is
// N and the 8-wide side is M. At M = 1 seven eighths of the products are wasted, but the tensor core is idle
// anyway and the float units do not become the limit.
#pragma once
#include <cstdint>

#include "tile.h"

namespace gm {

constexpr int kMaxDepth = 16;

struct DecodeParams {
  const uint8_t* w;  // packed weights: blocks of 64 rows, [block][K / 128][tiles of the block <= 4][kBytes]
  const void* x;     // [M, K], row stride ldx elements
  void* y;           // [M, N], row stride N
  const void* bias;  // [N] or null
  const void* residual;    // [M, N], row stride N, or null
  const float* row_scale;  // [N], multiplies a row's sum before bias and residual; or null
  int m, n, k, ldx, tiles, groups;
  int log_split, depth;       // CTAs of a cluster that share the rows, along K; slots of a ring
  int inbox, bars;            // bytes into shared memory: of what a cluster's CTAs exchange, of barriers
  int xaligned, scales_half;  // rows of x are 16-byte aligned; scales are fp16, not bf16
};

}  // namespace gm

#ifdef __CUDACC__
#include "decoders_mma.cuh"
#include "sm90/mma.cuh"
#include "sm90/tma.cuh"

namespace gm {

// A slot of x holds x[:, k0 : k0 + 128] as two halves of 64 k, each of rows of 128 bytes whose eight 16-byte
// chunks are permuted by exclusive or with the row (the tensor cores' 128-byte swizzle): eight rows of a
// chunk meet no bank twice.
__device__ __forceinline__ uint32_t x_offset(int rows, int row, int chunk) {
  return (chunk >> 3) * rows * 128 + row * 128 + ((chunk ^ row) & 7) * 16;
}

// A warp copies x to shared memory, with zeros past K. x may be any address: where its rows are not 16-byte
// aligned it copies element by element.
template <typename T>
__device__ __noinline__ void load_elements(const T* x, int m, int k, int ldx, uint32_t slot, int k0,
                                           int lane) {
  for (int c = lane; c < m * kTileK; c += 32) {
    const int row = c >> 7, i = c & (kTileK - 1);
    const T v = k0 + i < k ? x[static_cast<int64_t>(row) * ldx + k0 + i] : T(0.f);
    st_shared(slot + x_offset(m, row, i >> 3) + (i & 7) * 2, *reinterpret_cast<const uint16_t*>(&v));
  }
}

template <typename T, int NT>
struct XLoader {
  const char* src;  // this lane's 16 bytes of its first row, at the next k to be loaded
  int k, row, rows, row_step, lane;
  uint32_t slots;

  __device__ __forceinline__ XLoader(const DecodeParams& p, uint32_t slots, int k0, int lane)
      : lane(lane), slots(slots) {
    row = lane >> 4, k = k0 + (lane & 15) * 8;
    rows = (p.m - row + 1) / 2;
    row_step = 4 * p.ldx;
    src = static_cast<const char*>(p.x) + (static_cast<int64_t>(row) * p.ldx + k) * 2;
  }
  // Copies x[:, 128] to the slot at byte offset `slot` and moves on by `groups` groups of 128.
  __device__ __forceinline__ void load(const DecodeParams& p, uint32_t slot, int groups) {
    if (p.xaligned) {                                      // 16 lanes a row
      const uint32_t bytes = max(0, min(8, p.k - k)) * 2;  // the rest is filled with zeros
#pragma unroll
      for (int i = 0; i < NT * 4; ++i)
        if (i < rows)
          cp_async_16(slots + slot + x_offset(p.m, row + i * 2, lane & 15),
                      bytes ? src + static_cast<int64_t>(i) * row_step : static_cast<const char*>(p.x),
                      bytes);
    } else {
      load_elements<T>(static_cast<const T*>(p.x), p.m, p.k, p.ldx, slots + slot, k - (lane & 15) * 8, lane);
    }
    src += groups * (kTileK * 2), k += groups * kTileK;
  }
};

// The B fragments of 128 k, from a slot of x: two halves of 64 k, each of rows of 128 bytes in the tensor
// cores' 128-byte swizzle. row: the address of each fragment's row of the lane in the first half; swizzle: 16
// times its chunk exclusive-or that row.
template <int NT>
__device__ __forceinline__ void load_x(uint4 (&x)[NT][4], const uint32_t (&row)[NT],
                                       const uint32_t (&swizzle)[NT], uint32_t half_bytes) {
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t at = row[n] + (j >> 1) * half_bytes + (swizzle[n] ^ (j & 1) * 64);
      ldmatrix_x4(x[n][j], at);
    }
}

// Adds the finished sums of a group (G = 0: of the tile) to the accumulators, scaled.
template <typename W, int CH, int NT>
__device__ __forceinline__ void add_sums(float (&acc)[NT][4], const float (&part)[CH][NT][4], const W& w,
                                         int group, int scales_half) {
  float s[2] = {1.f, 1.f};
  if constexpr (W::kGroups > 0) {
    const float2 both = w.scale(group, scales_half);
    s[0] = both.x, s[1] = both.y;
  }
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float sum = CH == 2 ? part[0][n][i] + part[CH - 1][n][i] : part[0][n][i];
      acc[n][i] = W::kGroups > 0 ? acc[n][i] + s[i >> 1] * sum : sum;
    }
}

// Adds the products of TILES tiles by x to the accumulators. What it returns depends on every word that was
// loaded: an arrival at a barrier may overtake loads that it does not depend on.
template <typename T, typename W, int NT, int TILES>
__device__ __forceinline__ uint32_t multiply_tiles(float (*acc)[NT][4], const uint8_t* from,
                                                   const uint4 (&x)[NT][4], int lane, int scales_half) {
  // Tiles at a time (fp4 is 1 to 2 % faster with two, the others need fewer registers with one); chains of
  // products a tile; steps a group.
  constexpr int G = W::kGroups, TP = G == 0 ? 2 : 1, CH = NT == 1 && G <= 1 ? 2 : 1,
                kEvery = G > 1 ? 8 / G : 8;
  uint32_t any = 0;
#pragma unroll
  for (int c0 = 0; c0 < TILES; c0 += TP) {
    const int tiles = min(TILES - c0, TP);
    float (*to)[NT][4] = acc + c0;
    W w[TP];
    float part[TP][CH][NT][4];
#pragma unroll
    for (int c = 0; c < tiles; ++c) w[c].load(from + (c0 + c) * W::kBytes, lane), any |= w[c].any();
#pragma unroll
    for (int step = 0; step < 8; ++step) {
#pragma unroll
      for (int c = 0; c < tiles; ++c) {
        if (step % kEvery == 0) {  // sums start anew
#pragma unroll
          for (int h = 0; h < CH; ++h)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
              for (int i = 0; i < 4; ++i) part[c][h][n][i] = G == 0 && h == 0 ? to[c][n][i] : 0.f;
        }
        uint32_t a[4];
        w[c].pairs(step, a);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          const uint4& b = x[n][step >> 1];
          float (&sum)[4] = part[c][step % CH][n];
          Num<T>::mma(sum, a, step & 1 ? b.z : b.x, step & 1 ? b.w : b.y);
        }
        if (step % kEvery == kEvery - 1) add_sums<W, CH>(to[c], part[c], w[c], step / kEvery, scales_half);
      }
    }
  }
  return any;
}

// Stores a warp's accumulators to shared memory for finish_sums.
template <typename W, int NT, int RT>
__device__ __forceinline__ void leave_sums(const float (&acc)[RT][NT][4], uint8_t* smem, int warp, int lane) {
  float4* to = reinterpret_cast<float4*>(smem) + warp * (RT * NT * 32) + lane;
#pragma unroll
  for (int r = 0; r < RT; ++r)
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const float (&sum)[4] = acc[r][n];
      to[(r * NT + n) * 32] =
          make_float4(sum[0] * W::kFactor, sum[1] * W::kFactor, sum[2] * W::kFactor, sum[3] * W::kFactor);
    }
}

// Epilogue: shared memory holds, for each of SLICES slices of K, TILES x NT x 32 float4, the accumulators of
// a lane of mma. Adds the slices in order, reduces over the CTAs of a cluster through distributed shared
// memory (each owns a share, and adds in the order of ranks), and writes y. smem + p.inbox: memory behind the
// sums for that; the CTAs have arrived at the cluster's barrier since they used what else lies there.
template <typename T, int NT, int TILES, int SLICES, int THREADS>
__device__ __forceinline__ void finish_sums(const DecodeParams& p, uint8_t* smem, int tile0, int rank) {
  constexpr int kElems = TILES * NT * 32;
  const float4* scratch = reinterpret_cast<const float4*>(smem);
  float4* inbox = reinterpret_cast<float4*>(smem + p.inbox);
  const int split = 1 << p.log_split;
  __syncthreads();
  const auto local_sum = [&](int e) {
    float4 sum = scratch[e];
#pragma unroll
    for (int w = 1; w < SLICES; ++w) {
      const float4 v = scratch[w * kElems + e];
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    return sum;
  };
  const bool finishing = p.bias != nullptr || p.residual != nullptr || p.row_scale != nullptr;
  const auto store = [&](int e, const float4& v) {
    const int l = e & 31, n = e / 32 % NT, row = (tile0 + e / (32 * NT)) * kTileRows + (l >> 2),
              m = n * 8 + (l & 3) * 2;
    if (m >= p.m || row >= p.n) return;
    const float value[4] = {v.x, v.y, v.z, v.w};
    const int64_t first = static_cast<int64_t>(m) * p.n + row;
    const bool there[4] = {true, m + 1 < p.m, row + 8 < p.n, m + 1 < p.m && row + 8 < p.n};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!there[i]) continue;
      const int64_t at = first + (i & 1) * p.n + (i >> 1) * 8;
      float sum = value[i];
      if (finishing) {
        if (p.row_scale) sum *= p.row_scale[row + (i >> 1) * 8];
        if (p.bias) sum += Num<T>::to_float(static_cast<const T*>(p.bias)[row + (i >> 1) * 8]);
        if (p.residual) sum += Num<T>::to_float(static_cast<const T*>(p.residual)[at]);
      }
      static_cast<T*>(p.y)[at] = Num<T>::round(sum);
    }
  };

  if (split == 1) {
    for (int e = threadIdx.x; e < kElems; e += THREADS) store(e, local_sum(e));
    return;
  }
  cluster_wait();  // every CTA of the cluster is done with its rings: they may be written to
  const int share = kElems >> p.log_split;
  for (int e = threadIdx.x; e < kElems; e += THREADS) {
    const float4 v = local_sum(e);
    const int owner = e / share;
    st_cluster(mapa(smem_u32(inbox + rank * share + e - owner * share), owner), v);
  }
  cluster_sync();
  for (int e = threadIdx.x; e < share; e += THREADS) {
    float4 sum = inbox[e];
    for (int s = 1; s < split; ++s) {
      const float4 v = inbox[s * share + e];
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    store(rank * share + e, sum);
  }
}

}  // namespace gm
#endif
