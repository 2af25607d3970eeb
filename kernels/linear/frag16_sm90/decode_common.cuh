// Common parts of the decode kernels: parameters, x in shared memory, products, and the split-K epilogue.
//
// W is the A operand of mma.m16n8k16, x the B operand: the instruction's M of 16 is N of the problem, its N of 8 is M.
// At M = 1 seven eighths of the products are padding, but the tensor cores are not the bottleneck.
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
  int log_split, depth;       // log2 of the CTAs of a cluster, which split K; slots of a ring
  int exchange, bars;         // offsets in shared memory: of the cluster's partial sums, of barriers
  int xaligned, scales_half;  // rows of x are 16-byte aligned; scales are fp16, not bf16
};

}  // namespace gm

#ifdef __CUDACC__
#include "decoders_mma.cuh"
#include "sm90/mma.cuh"
#include "sm90/tma.cuh"

namespace gm {

// A slot of x holds x[:, k0 : k0 + 128] as two halves of 64 k, each of rows of 128 bytes in the 128-byte swizzle: the
// eight 16-byte chunks of a row are permuted by exclusive or with the row, so that eight rows have no bank conflicts.
__device__ __forceinline__ uint32_t x_offset(int rows, int row, int chunk) {
  return (chunk >> 3) * rows * 128 + row * 128 + ((chunk ^ row) & 7) * 16;
}

// Copies x to shared memory by a warp, element by element, with zeros past K: for rows that are not 16-byte aligned.
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
  const char* src;  // this lane's 16 bytes of its first row, at the next k
  int k, row, rows, row_step, lane;
  uint32_t slots;

  __device__ __forceinline__ XLoader(const DecodeParams& p, uint32_t slots, int k0, int lane)
      : lane(lane), slots(slots) {
    row = lane >> 4, k = k0 + (lane & 15) * 8;
    rows = (p.m - row + 1) / 2;
    row_step = 4 * p.ldx;
    src = static_cast<const char*>(p.x) + (static_cast<int64_t>(row) * p.ldx + k) * 2;
  }
  // Copies 128 columns of x to the slot at byte offset `slot`, and advances by `groups` groups of 128.
  __device__ __forceinline__ void load(const DecodeParams& p, uint32_t slot, int groups) {
    if (p.xaligned) {                                      // 16 lanes per row
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

// Loads the B fragments of 128 k from a slot of x. row: address of the lane's row of each fragment in the first half;
// swizzle: 16 times its chunk exclusive-or that row.
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

// Adds the sums of a group (G = 0: of the tile), times its scale, to the accumulators.
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

// Adds the products of TILES tiles by x to the accumulators. The result depends on every word that was loaded: an
// arrival at a barrier may be reordered before loads that it does not depend on.
template <typename T, typename W, int NT, int TILES>
__device__ __forceinline__ uint32_t multiply_tiles(float (*acc)[NT][4], const uint8_t* from,
                                                   const uint4 (&x)[NT][4], int lane, int scales_half) {
  // TP: tiles at a time (fp4 is 1 to 2 % faster with two, the others need fewer registers with one). CH: independent
  // chains of products per tile. kEvery: steps per group.
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
        if (step % kEvery == 0) {  // a new group
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

// Stores a warp's accumulators to shared memory for reduce_and_store.
template <typename W, int NT, int RT>
__device__ __forceinline__ void store_partials(const float (&acc)[RT][NT][4], uint8_t* smem, int warp,
                                               int lane) {
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

// Split-K epilogue: shared memory has, for each of SLICES slices of K, TILES x NT x 32 float4, the accumulators of a
// lane. Adds the slices in order, reduces over the CTAs of the cluster through distributed shared memory (each CTA
// owns a share of the elements, and adds in the order of ranks), and writes y. The partial sums of other CTAs come to
// smem + p.exchange, behind the own ones; the CTAs have arrived at the cluster barrier since they last read it.
template <typename T, int NT, int TILES, int SLICES, int THREADS>
__device__ __forceinline__ void reduce_and_store(const DecodeParams& p, uint8_t* smem, int tile0, int rank) {
  constexpr int kElems = TILES * NT * 32;
  const float4* scratch = reinterpret_cast<const float4*>(smem);
  float4* exchange = reinterpret_cast<float4*>(smem + p.exchange);
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
  const bool has_epilogue = p.bias != nullptr || p.residual != nullptr || p.row_scale != nullptr;
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
      if (has_epilogue) {
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
  cluster_wait();  // every CTA of the cluster has drained its rings, whose memory is reused
  const int share = kElems >> p.log_split;
  for (int e = threadIdx.x; e < kElems; e += THREADS) {
    const float4 v = local_sum(e);
    const int owner = e / share;
    st_cluster(mapa(smem_u32(exchange + rank * share + e - owner * share), owner), v);
  }
  cluster_sync();
  for (int e = threadIdx.x; e < share; e += THREADS) {
    float4 sum = exchange[e];
    for (int s = 1; s < split; ++s) {
      const float4 v = exchange[s * share + e];
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    store(rank * share + e, sum);
  }
}

}  // namespace gm
#endif
