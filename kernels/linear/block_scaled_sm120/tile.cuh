// What a CTA does for one tile of y of block-scaled codes, whichever rows of x and of W it is made of, for sm_120 and sm_121: a ring of slots
// in shared memory, filled by cp.async, and products of slots of 128 columns, sums in float32.
//
// W is the A operand of mma.sync, x the B operand: a warp owns two tiles of 16 rows of W for all MT rows of x of its CTA. Codes of both go
// to registers by ldmatrix, whose 8 x 8 elements of 16 bits are 8 x 16 bytes here. Scales come along as they are stored; those of 32 rows lie
// in the order of the lanes whose registers the instruction reads them from, so that each lane takes the scales of a row and slot by one load.
#pragma once
#include "params.h"
#include "sm120/mma_block_scale.cuh"

#ifdef __CUDACC__
#include <utility>

#include "sm120/copy.cuh"
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
struct Tile {
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

  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  uint32_t ring;
  float* out;  // the warp's output buffer: its rows of W in the first slot, once they are read
  float acc[kWarpTiles][kColumns][4];  // sums of 32 rows of W by MT rows of x

  __device__ __forceinline__ explicit Tile(uint8_t* smem) : ring(smem_u32(smem)) {
    out = reinterpret_cast<float*>(smem + kX + warp * kWarpRows * KB);
  }

  // The chunks of a row are permuted by exclusive or with this, so that eight rows have no bank conflicts.
  __device__ __forceinline__ static int swizzle(int row) { return row / kRows128 % kChunks; }
  // The place of a row's scales: those of 32 rows are in the order of lanes.
  __device__ __forceinline__ static int scale_place(int row) {
    return (row & ~31) + (row & 7) * 4 + (row >> 3 & 3);
  }
  // This thread's row among kCopyRows, and its chunk of it; where that goes in a slot's x or W.
  __device__ __forceinline__ static int copy_row() { return threadIdx.x / kChunks; }
  __device__ __forceinline__ static int copy_chunk() { return threadIdx.x % kChunks; }
  __device__ __forceinline__ static int copy_place() {
    return copy_row() * KB + (copy_chunk() ^ swizzle(copy_row())) * 16;
  }

  // The scales that this thread copies: of row threadIdx.x of the rows of x, and of W; null for rows that are not there.
  struct Scales {
    const uint8_t *of_x, *of_w, *valid;  // valid: an address that may be read, for zeros

    // Copies those of the next slot.
    __device__ __forceinline__ void copy(uint32_t slot) {
      const uint32_t to = slot + kCodes + scale_place(threadIdx.x) * Slot::kScales;
      if (threadIdx.x < kXGroups * 32) cp_async_small<Slot::kScales>(to, of_x ? of_x : valid, of_x);
      cp_async_small<Slot::kScales>(to + kXScales, of_w ? of_w : valid, of_w);
      if (of_x) of_x += Slot::kScales;
      if (of_w) of_w += Slot::kScales;
    }
  };

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

  // The sums over `slots` slots. fetch(slot) starts to copy the next 128 columns to a slot, and is called once for each.
  template <typename Fetch>
  __device__ __forceinline__ void accumulate(int slots, const Fetch& fetch) {
    int left = slots;
#pragma unroll
    for (int i = 0; i < kWarpTiles * kColumns * 4; ++i) acc[i / 4 / kColumns][i / 4 % kColumns][i % 4] = 0.f;

    __syncthreads();  // every warp has read the slots and its output buffer of the tile before
    const auto next = [&](uint32_t slot) {
      if (left > 0) fetch(slot);
      cp_async_commit();
      --left;
    };
#pragma unroll
    for (int i = 0; i < SLOTS - 1; ++i) next(ring + i * kSlot);
    uint32_t slot = ring;
#pragma unroll 1
    for (int g = 0; g < slots; ++g) {
      cp_async_wait<SLOTS - 2>();
      __syncthreads();  // the slot has landed for all, and all have read the one before, which is filled again
      next(slot == ring ? slot + (SLOTS - 1) * kSlot : slot - kSlot);
      multiply(slot);
      slot = slot == ring + (SLOTS - 1) * kSlot ? ring : slot + kSlot;
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
        out[(2 * t + (i & 1)) * kOutStride + r * 16 + g + (i >> 1) * 8] = acc[r][c][i];
    __syncwarp();
  }
};

}  // namespace gm::block_scaled
#endif
