// What a CTA of the schedule gemm does for one tile of y, whichever rows of x and of W it is made of: rings of x and of
// packed weights in shared memory, filled by cp.async, and products of groups of 128 k.
//
// W is the A operand of mma.m16n8k16, x the B operand: a warp owns two tiles of 16 rows of W for all MT rows of x of its
// CTA, so every weight is decoded once for MT rows, in registers, and the warps share x.
// Marlin (Frantar et al., 2024) has the idea of weights in fragment order under a pipeline of cp.async.
#pragma once
#include <cstdint>

#include "linear/frag16_sm90/tile.h"

namespace gm {

constexpr int kWarpTiles = 2;                  // tiles of 16 rows of W per warp
constexpr int kXBytes = 64 * 2;                // of a row of a slot of x
constexpr int kOutStride = 32 + 4;             // floats of a row of a warp's output buffer
constexpr int kOutBytes = 8 * kOutStride * 4;  // 8 rows of x

}  // namespace gm

#ifdef __CUDACC__
#include "sm90/mma.cuh"

namespace gm {

// W: a class of operands.cuh.  MT: rows of x.  WN: warps.  NX, NW: slots of x (64 k) and of weights (128 k).
template <typename W, int MT, int WN, int NX, int NW>
struct GemmTile {
  using T = typename W::Type;
  static_assert(NX <= 2 * NW - 1, "a group of weights is copied no later than its first slot of x");
  static constexpr int kThreads = WN * 32, kColumns = MT / 8, kXSlot = MT * kXBytes,
                       kXRows = kThreads / 8,  // that its threads copy at a time, 16 bytes each
      kWarpBytes = kWarpTiles * W::kBytes, kWSlot = WN * kWarpBytes;
  static_assert(MT % 16 == 0 && MT % kXRows == 0);
  static_assert(kWarpBytes % 16 == 0 && kOutBytes <= kWarpBytes);

  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int scales_half;  // 16-bit scales are fp16, not bf16
  uint32_t xs, ws;        // rings of x and of this warp's weights
  float* out;             // the warp's output buffer: its first slot of weights, once they are read
  float acc[kWarpTiles][kColumns][4];  // sums of 32 rows of W by MT rows of x
  W weights[kWarpTiles];

  __device__ __forceinline__ GemmTile(uint8_t* smem, int scales_half) : scales_half(scales_half) {
    xs = smem_u32(smem), ws = xs + NX * kXSlot + warp * kWarpBytes;
    out = reinterpret_cast<float*>(smem + NX * kXSlot + warp * kWarpBytes);
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int r = 0; r < kWarpTiles; ++r)
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[r][c][i] = 0.f;
  }

  // Where this thread's 16 bytes of its first row go in a slot of x. The chunks of a row are permuted by exclusive or
  // with the row, so that eight rows have no bank conflicts; a thread's next row is kXRows further.
  __device__ __forceinline__ uint32_t place_in_x() const {
    const int chunk = threadIdx.x & 7, first = threadIdx.x >> 3;
    return first * kXBytes + (chunk ^ (first & 7)) * 16;
  }

  // Adds the products of 64 k, half HALF of a group.
  template <int HALF>
  __device__ __forceinline__ void multiply(uint32_t x, uint32_t w) {
    typename W::Part part[kWarpTiles];
#pragma unroll
    for (int r = 0; r < kWarpTiles; ++r) part[r].load(w + r * W::kBytes, lane, HALF);
    // Of 16 rows of x: chunks 2 step and 2 step + 1 of the first eight, then of the others.
    const uint32_t from = x + ((lane & 7) + (lane >> 4) * 8) * kXBytes,
                   swizzle = ((lane >> 3 & 1) ^ (lane & 7)) * 16;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      // bounds how much is loaded ahead, and so registers
      if (MT == 128 || (MT == 32 && requires { typename W::Tile; })) __syncwarp();
      uint32_t a[kWarpTiles][4];
#pragma unroll
      for (int r = 0; r < kWarpTiles; ++r) weights[r].decode(HALF * 4 + step, part[r], a[r], scales_half);
      const uint32_t at = from + (swizzle ^ step * 32);
#pragma unroll
      for (int c = 0; c < kColumns; c += 2) {
        uint32_t b[4];
        ldmatrix_x4(b, at + c * 8 * kXBytes);
#pragma unroll
        for (int r = 0; r < kWarpTiles; ++r) {
          Num<T>::mma(acc[r][c], a[r], b[0], b[1]);
          Num<T>::mma(acc[r][c + 1], a[r], b[2], b[3]);
        }
      }
    }
  }

  // The sums over `groups` groups. copy_w(slot) starts to copy the warp's weights of the next group to a slot, and is
  // called once for each; copy_x(slot) the next 64 k of x, of which there are zeros past the last.
  template <typename CopyW, typename CopyX>
  __device__ __forceinline__ void accumulate(int groups, CopyW&& copy_w, CopyX&& copy_x) {
    int left = groups;  // of which weights are not yet requested
    clear();

    __syncthreads();  // every warp has read the slots of the tile before
    const auto fetch_w = [&](uint32_t slot) {
      if (left > 0) copy_w(slot);
      --left;
    };
    const auto fetch_x = [&](uint32_t slot) { copy_x(slot), cp_async_commit(); };
#pragma unroll
    for (int i = 0; i < NW - 1; ++i) fetch_w(ws + i * kWSlot);
#pragma unroll
    for (int i = 0; i < NX - 1; ++i) fetch_x(xs + i * kXSlot);

    uint32_t x = xs, w = ws;
    // Waits until a slot of x has landed for all, and all have read the one before, which is filled again.
    const auto turn = [&] {
      cp_async_wait<NX - 2>();
      __syncthreads();
    };
    const auto before = [&](uint32_t slot, uint32_t first, int count, int bytes) {
      return slot == first ? slot + (count - 1) * bytes : slot - bytes;
    };
    const auto next_x = [&] { x = x == xs + (NX - 1) * kXSlot ? xs : x + kXSlot; };
#pragma unroll 1
    while (left > 1 - NW) {
      turn();
      fetch_w(before(w, ws, NW, kWSlot)), fetch_x(before(x, xs, NX, kXSlot));
      multiply<0>(x, w);
      next_x(), turn();
      fetch_x(before(x, xs, NX, kXSlot));
      multiply<1>(x, w);
      next_x();
      w = w == ws + (NW - 1) * kWSlot ? ws : w + kWSlot;
    }
    cp_async_wait<0>();
  }

  // Eight rows of x, those of columns c: the sums of the first TILES tiles as out[row of x][row of W].
  template <int TILES>
  __device__ __forceinline__ void transpose(int c) {
    const int g = lane >> 2, t = lane & 3;
    __syncwarp();
#pragma unroll
    for (int r = 0; r < TILES; ++r)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        out[(2 * t + (i & 1)) * kOutStride + r * kTileRows + g + (i >> 1) * 8] = acc[r][c][i];
    __syncwarp();
  }
};

}  // namespace gm
#endif
