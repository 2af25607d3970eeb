// y[M, N] = x[M, K] · W[N, K]^T on block-scaled codes at any M, sums in float32, for sm_120 and sm_121.
//
// W is the A operand of mma.sync, x the B operand: a warp owns two tiles of 16 rows of W for all MT rows of x of its CTA. Codes of both come to
// shared memory by cp.async, 128 columns per slot of one ring, and to registers by ldmatrix, whose 8 x 8 elements of 16 bits are 8 x 16
// bytes here. Scales come along as they are stored; those of 32 rows lie in the order of the lanes whose registers the instruction reads
// them from, so that each lane takes the scales of a row and slot by one load.
//
// CTAs are persistent, and share the last tiles of y along K (stream_k.cuh).
#pragma once
#include "params.h"
#include "sm120/mma_block_scale.cuh"

#ifdef __CUDACC__
#include <utility>

#include "sm120/copy.cuh"
#include "sm80/stream_k.cuh"
#include "sm80/write_eight.cuh"
#include "sm90/ptx.cuh"

namespace gm::block_scaled {

constexpr int kOutStride = kWarpRows + 4;      // floats of a row of a warp's output buffer
constexpr int kOutBytes = 8 * kOutStride * 4;  // 8 rows of x

// f(0), f(1), ..., with numbers that are types: selectors of an instruction must be constants.
template <int... I, typename F>
__device__ __forceinline__ void each(std::integer_sequence<int, I...>, F f) {
  (f(std::integral_constant<int, I>{}), ...);
}
template <int COUNT, typename F>
__device__ __forceinline__ void each(F f) {
  each(std::make_integer_sequence<int, COUNT>{}, f);
}

// MT: rows of x.  WN: warps.  SLOTS: of the ring.
template <typename Format, int MT, int WN, int SLOTS>
struct Product : StreamK<Product<Format, MT, WN, SLOTS>, float4, WN, kWarpTiles, MT / 8> {
  using Slot = BlockSlot<Format>;
  static constexpr int KB = Slot::kBytes, kThreads = WN * 32, kColumns = MT / 8, kRows = WN * kWarpRows,
                       kChunks = KB / 16,        // of 16 bytes, of a row of a slot
      kCopyRows = kThreads / kChunks,            // that all threads copy at a time
      kX = MT * KB, kCodes = kX + kRows * KB,    // bytes of a slot: x, W, then their scales
      kXGroups = (MT + 31) / 32,                 // of 32 rows of x
      kXScales = kXGroups * 32 * Slot::kScales,  // bytes
      kSlot = kCodes + kXScales + kRows * Slot::kScales;
  static constexpr int kRows128 = 8 / kChunks;  // rows of a slot in the 128 bytes of all banks
  static_assert(MT % 16 == 0 && MT <= kThreads && kRows % kCopyRows == 0 && kSlot % 16 == 0);
  static_assert(kOutBytes <= kWarpRows * KB);

  const Params& p;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  uint32_t ring;
  float* out;  // the warp's output buffer: its rows of W in the first slot, once they are read
  float acc[kWarpTiles][kColumns][4];  // sums of 32 rows of W by MT rows of x

  __device__ __forceinline__ Product(const Params& p, uint8_t* smem) : p(p), ring(smem_u32(smem)) {
    out = reinterpret_cast<float*>(smem + kX + warp * kWarpRows * KB);
  }

  // A tile of y: its first row of x, and its first row of W.
  __device__ __forceinline__ int row0(int block) const { return block % p.high * MT; }
  __device__ __forceinline__ int n0(int block) const { return block / p.high * kRows; }

  // The chunks of a row are permuted by exclusive or with this, so that eight rows have no bank conflicts.
  __device__ __forceinline__ static int swizzle(int row) { return row / kRows128 % kChunks; }
  // The place of a row's scales: those of 32 rows are in the order of lanes.
  __device__ __forceinline__ static int scale_place(int row) {
    return (row & ~31) + (row & 7) * 4 + (row >> 3 & 3);
  }

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

  // Adds the products of a slot.
  __device__ __forceinline__ void multiply(uint32_t slot) {
    // Of 16 rows: of x, chunks 2 step and 2 step + 1 of the first eight, then of the others; of W, chunk 2 step of all,
    // then chunk 2 step + 1.
    const int low = lane & 7, upper = lane >> 4, odd = lane >> 3 & 1;
    const uint32_t x = slot + (low + upper * 8) * KB, x_swizzle = (odd ^ swizzle(low)) * 16;
    const uint32_t w = slot + kX + (warp * kWarpRows + low + odd * 8) * KB,
                   w_swizzle = (upper ^ swizzle(low)) * 16;
    const uint32_t scales = slot + kCodes + lane * Slot::kScales;
    uint32_t x_scales[kXGroups][Slot::kWords], w_scales[Slot::kWords];
    ld_shared(w_scales, scales + kXScales + warp * 32 * Slot::kScales);
#pragma unroll
    for (int i = 0; i < kXGroups; ++i) ld_shared(x_scales[i], scales + i * 32 * Slot::kScales);
    each<Slot::kSteps>([&](auto number) {
      constexpr int step = decltype(number)::value, first = step * Slot::kStepScales, word = first / 4,
                    byte = first % 4;
      if (MT == 128) __syncwarp();  // bounds how much is loaded ahead, and so registers
      uint32_t a[kWarpTiles][4];
#pragma unroll
      for (int r = 0; r < kWarpTiles; ++r) ldmatrix_x4(a[r], w + (w_swizzle ^ step * 32) + r * 16 * KB);
      const uint32_t at = x + (x_swizzle ^ step * 32);
      each<kColumns / 2>([&](auto pair) {
        constexpr int c = decltype(pair)::value * 2, of = c % 4;
        uint32_t b[4];
        ldmatrix_x4(b, at + c * 8 * KB);
        each<kWarpTiles>([&](auto tile) {
          constexpr int r = decltype(tile)::value;
          const uint32_t x_word = x_scales[c / 4][word], w_word = w_scales[word];
          mma_block_scale<Format, byte, r, of>(acc[r][c], a[r], b[0], b[1], w_word, x_word);
          mma_block_scale<Format, byte, r, of + 1>(acc[r][c + 1], a[r], b[2], b[3], w_word, x_word);
        });
      });
    });
  }

  // The sums of a tile of y over slots [g0, g1).
  __device__ __forceinline__ void accumulate(int block, int g0, int g1) {
    const int row = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks, m0 = row0(block), first = n0(block);
    const int place = row * KB + (chunk ^ swizzle(row)) * 16, column = g0 * KB + chunk * 16;
    const int64_t pitch = static_cast<int64_t>(p.groups) * KB, of_scales = p.groups * Slot::kScales;
    const uint8_t *x_from = p.x + (m0 + row) * pitch + column, *w_from = p.w + (first + row) * pitch + column;
    const int t = threadIdx.x;  // the row of x, and that of W, whose scales this thread copies
    const bool x_here = t < MT && m0 + t < p.m, w_here = first + t < p.n;
    const uint8_t* x_scale = x_here ? p.x_scale + (m0 + t) * of_scales + g0 * Slot::kScales : p.x_scale;
    const uint8_t* w_scale = w_here ? p.w_scale + (first + t) * of_scales + g0 * Slot::kScales : p.w_scale;
    const uint32_t scale_at = kCodes + scale_place(t) * Slot::kScales;
    int left = g1 - g0;
    this->clear();

    __syncthreads();  // every warp has read the slots and its output buffer of the tile before
    const auto fetch = [&](uint32_t slot) {
      if (left > 0) {
        copy<MT>(slot + place, x_from, kCopyRows * pitch, row, p.m - m0 - row, p.w);
        copy<kRows>(slot + kX + place, w_from, kCopyRows * pitch, row, p.n - first - row, p.w);
        if (t < kXGroups * 32) cp_async_small<Slot::kScales>(slot + scale_at, x_scale, x_here);
        cp_async_small<Slot::kScales>(slot + scale_at + kXScales, w_scale, w_here);
      }
      cp_async_commit();
      x_from += KB, w_from += KB, --left;
      if (x_here) x_scale += Slot::kScales;
      if (w_here) w_scale += Slot::kScales;
    };
#pragma unroll
    for (int i = 0; i < SLOTS - 1; ++i) fetch(ring + i * kSlot);
    uint32_t slot = ring;
#pragma unroll 1
    for (int g = g0; g < g1; ++g) {
      cp_async_wait<SLOTS - 2>();
      __syncthreads();  // the slot has landed for all, and all have read the one before, which is filled again
      fetch(slot == ring ? slot + (SLOTS - 1) * kSlot : slot - kSlot);
      multiply(slot);
      slot = slot == ring + (SLOTS - 1) * kSlot ? ring : slot + kSlot;
    }
    cp_async_wait<0>();
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
      __syncwarp();
#pragma unroll
      for (int r = 0; r < kWarpTiles; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          out[(2 * t + (i & 1)) * kOutStride + r * 16 + g + (i >> 1) * 8] = acc[r][c][i];
      __syncwarp();
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
