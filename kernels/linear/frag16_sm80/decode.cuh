// Schedule decode: y[M, N] = x[M, K] · W[N, K]^T at M <= 16, float32 accumulation, for sm_80 and newer.
//
//  - W is the A operand of mma.m16n8k16, x the B operand: the instruction's 16 rows are rows of W, its 8 columns
//    rows of x.
//  - Weights lie in memory in fragment order (quant/layouts/w4_frag16_v1.py): each lane loads its codes of a tile by
//    two 16-byte loads straight into registers, PF groups of 128 k ahead.
//  - The warps of a CTA take turns along K. Each has a ring of NX slots of x in shared memory for itself, filled by
//    cp.async: no barrier between warps until the end.
//  - Partial sums of the warps are added in shared memory, those of the CTAs that share a tile in global memory by
//    the last of them, both in a fixed order: the result is bitwise reproducible.
// The decoding and the scaling of sums per group are those of ../frag16_sm90/decode.cuh; Marlin (Frantar et al., 2024)
// has the idea of weights in fragment order.
#pragma once
#include <cstdint>

#include "linear/frag16_sm90/tile.h"

namespace gm {

struct DecodeParams {
  const uint8_t* w;  // packed weights: blocks of 64 rows, [block][K / 128][tiles of the block <= 4][kBytes]
  const void* x;     // [M, K], row stride ldx elements
  void* y;           // [M, N], row stride N
  const void* bias;  // [N] or null
  const void* residual;    // [M, N], row stride N, or null
  const float* row_scale;  // [N], multiplies a row's sum before bias and residual; or null
  uint32_t* counters;      // [blocks of rows], zero before and after
  float* sums;             // [blocks of rows][split][RT][NT][32 lanes][4]
  int64_t ldx;
  int m, n, k, tiles, groups;
  int xaligned, scales_half;  // rows of x are 16-byte aligned; scales are fp16, not bf16
};

}  // namespace gm

#ifdef __CUDACC__
#include "decoders.cuh"
#include "decoders_gguf.cuh"
#include "sm90/mma.cuh"

namespace gm {

// A slot of x holds x[:, k0 : k0 + 128] as rows of 256 bytes; the 16-byte chunks of a row are permuted by exclusive or
// with the row, so that eight rows have no bank conflicts.
__device__ __forceinline__ uint32_t x_chunk(int row, int chunk) {
  return row * 256 + (chunk ^ (row & 7)) * 16;
}

// Copies x to a slot by a warp, element by element, with zeros past K: for rows that are not 16-byte aligned.
template <typename T>
__device__ __noinline__ void copy_elements(const T* x, int64_t ldx, int m, int k, uint32_t slot, int k0,
                                           int lane) {
  for (int c = lane; c < m * kTileK; c += 32) {
    const int row = c / kTileK, i = c % kTileK;
    const T v = k0 + i < k ? x[row * ldx + k0 + i] : T(0.f);
    st_shared(slot + x_chunk(row, i >> 3) + (i & 7) * 2, *reinterpret_cast<const uint16_t*>(&v));
  }
}

// Copies x[:, k0 : k0 + 128] to a slot by a warp.
template <typename T, int NT>
__device__ __forceinline__ void copy_x(const DecodeParams& p, uint32_t slot, int k0, int lane) {
  const T* x = static_cast<const T*>(p.x);
  if (!p.xaligned) return copy_elements<T>(x, p.ldx, p.m, p.k, slot, k0, lane);
  const int chunk = lane & 15, k = k0 + chunk * 8;
  const uint32_t bytes = max(0, min(8, p.k - k)) * 2;  // the rest is filled with zeros
#pragma unroll
  for (int i = 0; i < NT * 4; ++i) {
    const int row = (lane >> 4) + 2 * i;
    if (row < p.m) cp_async_16(slot + x_chunk(row, chunk), bytes ? x + row * p.ldx + k : x, bytes);
  }
}

// Adds the products of a tile by x to the accumulators: of a group of columns first, then times its scale.
template <typename T, typename W, int NT>
__device__ __forceinline__ void multiply_tile(float (&acc)[NT][4], W& w, const uint4 (&x)[NT][4],
                                              int scales_half) {
  constexpr int G = W::kGroups, kEvery = G > 1 ? 8 / G : 8;
  float part[NT][4];
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    if (G > 0 && step % kEvery == 0) {
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) part[n][i] = 0.f;
    }
    uint32_t a[4];
    w.pairs(step, a);
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const uint4& b = x[n][step >> 1];
      Num<T>::mma(G > 0 ? part[n] : acc[n], a, step & 1 ? b.z : b.x, step & 1 ? b.w : b.y);
    }
    if constexpr (G > 0) {
      if (step % kEvery == kEvery - 1) {
        const float2 scale = w.scale(step / kEvery, scales_half);
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) acc[n][i] += (i < 2 ? scale.x : scale.y) * part[n][i];
      }
    }
  }
}

// Whether weights are scale * code - offset.
template <typename W>
constexpr bool kHasOffsets = requires(const W& w) { w.offset(0, 0); };

// The same for the tiles of decoders_gguf.cuh, RT of them at a time: sums of groups times their scales, less the sum of
// x there times the offset, if there are offsets. That sum is a product too, by an operand of ones, which the tiles
// share. load_x(x, j) loads the B fragments of columns 32 j .. 32 j + 31.
template <typename T, typename W, int NT, int RT, typename LoadX>
__device__ __forceinline__ void multiply_tiles(float (&acc)[RT][NT][4], const W (&w)[RT], const LoadX& load_x,
                                               int scales_half) {
  constexpr int kEvery = 8 / W::kGroups;
  constexpr uint32_t kOne =
      std::is_same_v<T, __half> ? 0x18001800u : 0x3C803C80u;  // 1 / kFactor, as codes have it
  static_assert(W::kFactor == (std::is_same_v<T, __half> ? 512.f : 64.f) && kEvery <= 2);
  constexpr uint32_t ones[4] = {kOne, kOne, kOne, kOne};
  uint4 x[NT];
#pragma unroll
  for (int group = 0; group < W::kGroups; ++group) {
    if (group * kEvery % 2 == 0) load_x(x, group * kEvery / 2);
    const auto multiply = [&](float (&sum)[NT][4], const uint32_t (&a)[4], int step) {
#pragma unroll
      for (int n = 0; n < NT; ++n)
        Num<T>::mma(sum[n], a, step & 1 ? x[n].z : x[n].x, step & 1 ? x[n].w : x[n].y);
    };
    float sum[NT][4] = {};  // of rows 2 t and 2 t + 1 of x, twice
    if constexpr (kHasOffsets<W>) {
#pragma unroll
      for (int i = 0; i < kEvery; ++i) multiply(sum, ones, group * kEvery + i);
    }
#pragma unroll
    for (int r = 0; r < RT; ++r) {
      float part[NT][4] = {};
#pragma unroll
      for (int i = 0; i < kEvery; ++i) {
        uint32_t a[4];
        w[r].pairs(group * kEvery + i, a);
        multiply(part, a, group * kEvery + i);
      }
      const float2 scale = w[r].scale(group, scales_half);
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[r][n][i] += (i < 2 ? scale.x : scale.y) * part[n][i];
      if constexpr (kHasOffsets<W>) {
        const float2 offset = w[r].offset(group, scales_half);
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) acc[r][n][i] -= (i < 2 ? offset.x : offset.y) * sum[n][i];
      }
    }
  }
}

// Writes the four sums of element e of a block of rows: lane e % 32 of the accumulators of tile e / 32 / NT.
template <typename T, int NT>
__device__ __forceinline__ void store_sums(const DecodeParams& p, int tile0, int e, const float4& v) {
  const int lane = e & 31, n = e / 32 % NT, m = n * 8 + (lane & 3) * 2;
  const int64_t row = static_cast<int64_t>(tile0 + e / (32 * NT)) * kTileRows + (lane >> 2);
  const float value[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t r = row + (i >> 1) * 8, at = static_cast<int64_t>(m + (i & 1)) * p.n + r;
    if (m + (i & 1) >= p.m || r >= p.n) continue;
    float sum = value[i];
    if (p.row_scale) sum *= p.row_scale[r];
    if (p.bias) sum += Num<T>::to_float(static_cast<const T*>(p.bias)[r]);
    if (p.residual) sum += Num<T>::to_float(static_cast<const T*>(p.residual)[at]);
    static_cast<T*>(p.y)[at] = Num<T>::round(sum);
  }
}

// W: the kind of weight, a decoder class.  NT: columns of x in eights.  RT: tiles of 16 rows per CTA, 1, 2 or 4.
// WK: warps, each along K.  NX: slots of x.  PF: groups of 128 k whose weights are loaded ahead.
template <typename T, typename W, int NT, int RT, int WK, int NX, int PF>
__device__ __forceinline__ void linear_decode(const DecodeParams& p) {
  extern __shared__ __align__(128) uint8_t smem[];
  __shared__ int is_last;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, split = gridDim.y, rank = blockIdx.y;
  const int kb0 = static_cast<int64_t>(p.groups) * rank / split,
            kb1 = static_cast<int64_t>(p.groups) * (rank + 1) / split;
  const int first = kb0 + warp, steps = max(0, (kb1 - first + WK - 1) / WK);
  const int tile0 = blockIdx.x * RT, base = tile0 & ~3, in_block = min(4, p.tiles - base);
  // Tiles past the end: the last one again, whose sums are never stored.
  const uint8_t* from = p.w + (static_cast<int64_t>(base) * p.groups +
                               static_cast<int64_t>(first) * in_block + (tile0 - base)) *
                                  W::kBytes;
  const int64_t stride = static_cast<int64_t>(WK) * in_block * W::kBytes;
  const int last_tile = min(RT, p.tiles - tile0) - 1;

  W w[PF + 1][RT];
  const auto load = [&](W(&to)[RT], int step) {
    if (step >= steps) return;
#pragma unroll
    for (int r = 0; r < RT; ++r) to[r].load(from + step * stride + min(r, last_tile) * W::kBytes, lane);
  };
#pragma unroll
  for (int i = 0; i < PF; ++i) load(w[i], i);

  const int xslot = p.m * 256;
  const uint32_t xs = smem_u32(smem) + warp * NX * xslot;
#pragma unroll
  for (int i = 0; i < NX - 1; ++i) {
    if (i < steps) copy_x<T, NT>(p, xs + i * xslot, (first + i * WK) * kTileK, lane);
    cp_async_commit();
  }
  // The lane's row of the B fragments; columns past M repeat the last one and are never stored.
  int xrow[NT];
#pragma unroll
  for (int n = 0; n < NT; ++n) xrow[n] = min(n * 8 + (lane & 7), p.m - 1);

  float acc[RT][NT][4];
#pragma unroll
  for (int r = 0; r < RT; ++r)
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[r][n][i] = 0.f;

  uint32_t at = xs, next = xs + (NX - 1) * xslot;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    load(w[PF], step + PF);
    cp_async_wait<NX - 2>();
    __syncwarp();  // this step's x has landed, and every lane has read the previous step's
    if (step + NX - 1 < steps) copy_x<T, NT>(p, next, (first + (step + NX - 1) * WK) * kTileK, lane);
    cp_async_commit();
    const uint32_t from = at;
    const auto load_x = [&](uint4& to, int n, int j) {
      ldmatrix_x4(to, from + x_chunk(xrow[n], 4 * j + (lane >> 3)));
    };
    if constexpr (requires { typename W::Tile; }) {
      multiply_tiles<T>(
          acc, w[0],
          [&](uint4(&x)[NT], int j) {
#pragma unroll
            for (int n = 0; n < NT; ++n) load_x(x[n], n, j);
          },
          p.scales_half);
    } else {
      uint4 x[NT][4];
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) load_x(x[n][j], n, j);
#pragma unroll
      for (int r = 0; r < RT; ++r) multiply_tile<T, W, NT>(acc[r], w[0][r], x, p.scales_half);
    }
    next = at;
    if ((at += xslot) == xs + NX * xslot) at = xs;
#pragma unroll
    for (int i = 0; i < PF; ++i)
#pragma unroll
      for (int r = 0; r < RT; ++r) w[i][r] = w[i + 1][r];
  }
  cp_async_wait<0>();
  __syncthreads();  // the slots of x are free: their memory takes the sums of the warps

  constexpr int kElements = RT * NT * 32;
  float4* scratch = reinterpret_cast<float4*>(smem);
#pragma unroll
  for (int r = 0; r < RT; ++r)
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const float (&sum)[4] = acc[r][n];
      scratch[warp * kElements + (r * NT + n) * 32 + lane] =
          make_float4(sum[0] * W::kFactor, sum[1] * W::kFactor, sum[2] * W::kFactor, sum[3] * W::kFactor);
    }
  __syncthreads();
  const auto add = [](float4& a, const float4& b) { a.x += b.x, a.y += b.y, a.z += b.z, a.w += b.w; };
  float4* sums = reinterpret_cast<float4*>(p.sums) + static_cast<int64_t>(blockIdx.x) * split * kElements;
  for (int e = threadIdx.x; e < kElements; e += WK * 32) {
    float4 sum = scratch[e];
#pragma unroll
    for (int i = 1; i < WK; ++i) add(sum, scratch[i * kElements + e]);
    if (split == 1)
      store_sums<T, NT>(p, tile0, e, sum);
    else
      __stcg(sums + rank * kElements + e, sum);
  }
  if (split == 1) return;

  // The last CTA to arrive adds the sums of all in the order of their ranks.
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = atomicAdd(p.counters + blockIdx.x, 1u) == static_cast<uint32_t>(split) - 1;
    if (is_last) p.counters[blockIdx.x] = 0;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  for (int e = threadIdx.x; e < kElements; e += WK * 32) {
    float4 sum = __ldcg(sums + e);
    for (int i = 1; i < split; ++i) add(sum, __ldcg(sums + i * kElements + e));
    store_sums<T, NT>(p, tile0, e, sum);
  }
}

}  // namespace gm
#endif
