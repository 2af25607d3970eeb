// y[M, N] = x[M, K] · W[N, K]^T on bytes at any M, by mma.m16n8k32, for sm_75 and newer.
//
// W is the A operand, x the B operand: a warp owns two tiles of 16 rows of W for all MT rows of x of its CTA. Both come to
// shared memory by cp.async, KB columns of each per slot of one ring, and to registers by ldmatrix, whose 8 x 8 elements
// of 16 bits are 8 x 16 bytes here. OPERANDS (int8.cuh, fp8.cuh) says what the bytes are, and how they are multiplied.
//
// CTAs are persistent, and share the last tiles of y along K (stream_k.cuh). Exact sums are the same in any order, so there
// a row of y depends neither on the shape nor on the other rows of x.
//
// Sums of floats have two levels: the products of a slot, at most 128 columns, are added up by the tensor core, from zero,
// and then to float32 sums, with block scales times the scale of W's block and that of x's group. The tensor cores of
// sm_89 and sm_90 keep 13 bits of the fraction of a sum of e4m3 products, as SageAttention2 (2024) and DeepSeek-V3 (2024)
// measured, whatever the format of the result; over all of K that would lose what a float32 sum keeps.
#pragma once
#include "params.h"

#ifdef __CUDACC__
#include "sm80/stream_k.cuh"
#include "sm80/write_eight.cuh"
#include "sm90/ptx.cuh"

namespace gm::w8a8 {

constexpr int kOutStride = kWarpRows + 4;      // floats of a row of a warp's output buffer
constexpr int kOutBytes = 8 * kOutStride * 4;  // 8 rows of x

// OPERANDS: Sum, the type of a sum, and Four of them; kAsync, whether cp.async copies; kTwoLevels; kBlocks, whether scales
// are of blocks; weight(), of four codes of W as they are stored; mma().  MT: rows of x.  WN: warps.  KB: columns of a slot, 64 or 128.  SLOTS: of the ring.
template <typename OPERANDS, int MT, int WN, int KB, int SLOTS>
struct Product
    : StreamK<Product<OPERANDS, MT, WN, KB, SLOTS>, typename OPERANDS::Four, WN, kWarpTiles, MT / 8> {
  using Sum = typename OPERANDS::Sum;
  static constexpr bool kBlocks = OPERANDS::kBlocks;
  static constexpr int kThreads = WN * 32, kColumns = MT / 8, kRows = WN * kWarpRows, kSteps = KB / 32,
                       kChunks = KB / 16,                        // of 16 bytes, of a row of a slot
      kCopyRows = kThreads / kChunks;                            // that all threads copy at a time
  static constexpr int kX = MT * KB, kScales = kX + kRows * KB,  // bytes of a slot: x, then W,
      kSlot = kScales + (kBlocks ? (MT + kRows) * 4 : 0);        // then scales of x and of W
  static constexpr int kRows128 = 8 / kChunks;  // rows of a slot in the 128 bytes of all banks
  static_assert(MT % 16 == 0 && MT % kCopyRows == 0 && kRows % kCopyRows == 0 && kCopyRows % 8 == 0);
  static_assert(kOutBytes <= kWarpRows * KB && kBlock % KB == 0 && kThreads == kRows);

  const Params& p;
  uint8_t* const smem;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  uint32_t ring;
  float* out;  // the warp's output buffer: its rows of W in the first slot, once they are read
  Sum acc[kWarpTiles][kColumns][4];  // sums of 32 rows of W by MT rows of x

  __device__ __forceinline__ Product(const Params& p, uint8_t* smem)
      : p(p), smem(smem), ring(smem_u32(smem)) {
    out = reinterpret_cast<float*>(smem + kX + warp * kWarpRows * KB);
  }

  // A tile of y: its first row of x, and its first row of W.
  __device__ __forceinline__ int row0(int block) const { return block % p.high * MT; }
  __device__ __forceinline__ int n0(int block) const { return block / p.high * kRows; }

  // The chunks of a row are permuted by exclusive or with this, so that eight rows have no bank conflicts.
  __device__ __forceinline__ static int swizzle(int row) { return row / kRows128 % kChunks; }

  // Copies this thread's chunk of every kCopyRows-th of COUNT rows; zeros past `rows` and where nothing is `here`.
  template <int COUNT>
  __device__ __forceinline__ static void copy(uint32_t to, const uint8_t* from, int64_t step, int rows,
                                              bool here, const uint8_t* valid) {
#pragma unroll
    for (int i = 0; i < COUNT / kCopyRows; ++i) {
      const bool there = here && rows > i * kCopyRows;
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
    const auto w_at = [&](int step, int r) { return w + (w_swizzle ^ step * 32) + r * 16 * KB; };
    const auto x_at = [&](int step, int c) { return x + (x_swizzle ^ step * 32) + c * 8 * KB; };
    if constexpr (OPERANDS::kTwoLevels)
      multiply_in_two_levels(slot - ring, w_at, x_at);
    else
      multiply_in_one(w_at, x_at);
  }
  template <typename W, typename X>
  __device__ __forceinline__ void multiply_in_one(const W& w_at, const X& x_at) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (MT == 128) __syncwarp();  // bounds how much is loaded ahead, and so registers
      uint32_t a[kWarpTiles][4];
#pragma unroll
      for (int r = 0; r < kWarpTiles; ++r) load_weights(a[r], w_at(step, r));
#pragma unroll
      for (int c = 0; c < kColumns; c += 2) {
        uint32_t b[4];
        ldmatrix_x4(b, x_at(step, c));
#pragma unroll
        for (int r = 0; r < kWarpTiles; ++r) {
          OPERANDS::mma(acc[r][c], a[r], b[0], b[1]);
          OPERANDS::mma(acc[r][c + 1], a[r], b[2], b[3]);
        }
      }
    }
  }
  // offset: of the slot in the ring, in bytes.
  template <typename W, typename X>
  __device__ __forceinline__ void multiply_in_two_levels(uint32_t offset, const W& w_at, const X& x_at) {
    const float* scales = reinterpret_cast<const float*>(smem + offset + kScales);
    uint32_t a[kSteps][kWarpTiles][4];
    float w_scale[kWarpTiles][2] = {};
#pragma unroll
    for (int r = 0; r < kWarpTiles; ++r) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) load_weights(a[step][r], w_at(step, r));
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if constexpr (kBlocks) w_scale[r][i] = scales[MT + warp * kWarpRows + r * 16 + i * 8 + (lane >> 2)];
    }
#pragma unroll
    for (int c = 0; c < kColumns; c += 2) {
      __syncwarp();  // bounds how much is loaded ahead, and so registers
      uint32_t b[kSteps][4];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) ldmatrix_x4(b[step], x_at(step, c));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float2 x_scale = make_float2(0.f, 0.f);
        if constexpr (kBlocks)
          x_scale = *reinterpret_cast<const float2*>(scales + (c + j) * 8 + (lane & 3) * 2);
#pragma unroll
        for (int r = 0; r < kWarpTiles; ++r) {
          Sum part[4] = {};
#pragma unroll
          for (int step = 0; step < kSteps; ++step)
            OPERANDS::mma(part, a[step][r], b[step][2 * j], b[step][2 * j + 1]);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            Sum& sum = acc[r][c + j][i];
            if constexpr (kBlocks)
              sum = __fmaf_rn(part[i], __fmul_rn(w_scale[r][i >> 1], i & 1 ? x_scale.y : x_scale.x), sum);
            else
              sum += part[i];
          }
        }
      }
    }
  }
  // Of 16 rows of W by 32 columns.
  __device__ __forceinline__ static void load_weights(uint32_t (&a)[4], uint32_t from) {
    ldmatrix_x4(a, from);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = OPERANDS::weight(a[i]);
  }

  // Element `index` of the scales of W.
  __device__ __forceinline__ float w_scale_at(int64_t index) const {
    return p.w_type == 0 ? __ldg(static_cast<const float*>(p.w_scale) + index)
                         : widened(p.w_scale, index, p.w_type == 1);
  }

  // The sums of a tile of y over groups [g0, g1).
  __device__ __forceinline__ void accumulate(int block, int g0, int g1) {
    if constexpr (OPERANDS::kAsync)
      accumulate_by_copies(block, g0, g1);
    else
      accumulate_through_registers(block, g0, g1);
  }
  __device__ __forceinline__ void accumulate_by_copies(int block, int g0, int g1) {
    const int row = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks, m = row0(block) + row,
              n = n0(block) + row;
    const int place = row * KB + (chunk ^ swizzle(row)) * 16;
    const int first = g0 * KB + chunk * 16;
    const uint8_t *x_from = p.x + m * p.ldx + first, *w_from = p.w + static_cast<int64_t>(n) * p.k + first;
    int next = g0;  // the group to be fetched
    // Scales of blocks: those of this thread's row of W, past the end of the last one, and the next to be written to a slot.
    int of_row = 0;
    float pending = 0.f;
    if constexpr (kBlocks) {
      of_row = p.row_block[min(n0(block) + static_cast<int>(threadIdx.x), p.n - 1)] * p.k_blocks;
      pending = w_scale_at(of_row + next * KB / kBlock);
    }
    this->clear();

    __syncthreads();  // every warp has read the slots and its output buffer of the tile before
    const auto fetch = [&](uint32_t slot) {
      if (next < g1) {
        const int column = next * KB + chunk * 16;
        copy<MT>(slot + place, x_from, kCopyRows * p.ldx, p.m - m, column < p.k, p.w);
        copy<kRows>(slot + kX + place, w_from, static_cast<int64_t>(kCopyRows) * p.k, p.n - n, column < p.k,
                    p.w);
        if constexpr (kBlocks) {
          float* scales = reinterpret_cast<float*>(smem + (slot - ring) + kScales);
          scales[MT + threadIdx.x] = pending;
          if (threadIdx.x < MT / 4) {
            const int four = row0(block) + threadIdx.x * 4, count = min(4, p.m - four);
            const int64_t at = count > 0 ? static_cast<int64_t>(next * KB / kBlock) * p.x_pitch + four : 0;
            cp_async_16(smem_u32(scales + threadIdx.x * 4), p.x_scale + at, count > 0 ? count * 4 : 0);
          }
        }
      }
      cp_async_commit();
      x_from += KB, w_from += KB, ++next;
      if (kBlocks && next < g1) pending = w_scale_at(of_row + next * KB / kBlock);
    };
#pragma unroll
    for (int i = 0; i < SLOTS - 1; ++i) fetch(ring + i * kSlot);
    uint32_t slot = ring;
#pragma unroll 1
    while (next < g1 + SLOTS - 1) {
      cp_async_wait<SLOTS - 2>();
      __syncthreads();  // the slot has landed for all, and all have read the one before, which is filled again
      fetch(slot == ring ? slot + (SLOTS - 1) * kSlot : slot - kSlot);
      multiply(slot);
      slot = slot == ring + (SLOTS - 1) * kSlot ? ring : slot + kSlot;
    }
    cp_async_wait<0>();
  }

  // Loads this thread's chunk of every kCopyRows-th of COUNT rows; zeros past `rows` and where nothing is `here`.
  template <int COUNT>
  __device__ __forceinline__ static void load(uint4 (&to)[COUNT], const uint8_t* from, int64_t step, int rows,
                                              bool here) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      to[i] = make_uint4(0, 0, 0, 0);
      if (here && rows > i * kCopyRows) to[i] = __ldg(reinterpret_cast<const uint4*>(from));
      from += step;
    }
  }
  template <int COUNT>
  __device__ __forceinline__ static void put(uint8_t* to, const uint4 (&from)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) *reinterpret_cast<uint4*>(to + i * kCopyRows * KB) = from[i];
  }
  // What a slot will have is in registers while the other one is multiplied.
  __device__ __forceinline__ void accumulate_through_registers(int block, int g0, int g1) {
    static_assert(OPERANDS::kAsync || (SLOTS == 2 && !kBlocks));
    const int row = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks, m = row0(block) + row,
              n = n0(block) + row;
    uint8_t* const place = smem + row * KB + (chunk ^ swizzle(row)) * 16;
    int column = g0 * KB + chunk * 16, slot = 0;
    const uint8_t *x_from = p.x + m * p.ldx + column, *w_from = p.w + static_cast<int64_t>(n) * p.k + column;
    uint4 x[MT / kCopyRows], w[kRows / kCopyRows];
    const auto fetch = [&] {
      load(x, x_from, kCopyRows * p.ldx, p.m - m, column < p.k);
      load(w, w_from, static_cast<int64_t>(kCopyRows) * p.k, p.n - n, column < p.k);
      x_from += KB, w_from += KB, column += KB;
    };
    const auto store = [&](int to) { put(place + to, x), put(place + to + kX, w); };
    fetch();
    this->clear();
    __syncthreads();  // every warp has read the slots and its output buffer of the tile before
    store(0);
#pragma unroll 1
    for (int g = g0 + 1; g <= g1; ++g) {
      __syncthreads();  // the slot is written, and all have read the other one
      if (g < g1) fetch();
      multiply(ring + slot);
      slot = kSlot - slot;
      if (g < g1) store(slot);
    }
  }

  // Rounds and writes the sums, 8 rows of x at a time, through shared memory: a lane writes 8 neighbouring columns of y.
  __device__ __forceinline__ void store(int block) {
    const int g = lane >> 2, t = lane & 3, n = n0(block) + warp * kWarpRows + t * 8, m0 = row0(block) + g;
    const int count = min(8, p.n - n);
    float w_scale[8], bias[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const bool here = i < count;
      w_scale[i] = here && !kBlocks ? w_scale_at(n + i) : 0.f;
      bias[i] = here && p.bias ? widened(p.bias, n + i, p.half) : 0.f;
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      __syncwarp();
#pragma unroll
      for (int r = 0; r < kWarpTiles; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          out[(2 * t + (i & 1)) * kOutStride + r * 16 + g + (i >> 1) * 8] = static_cast<float>(acc[r][c][i]);
      __syncwarp();
      const int m = m0 + c * 8;
      float* sums = out + g * kOutStride + t * 8;
      if (m < p.m && count > 0) {
        const float x_scale = kBlocks ? 0.f : p.x_scale[m * p.x_step];
        write_eight(p, sums, static_cast<int64_t>(m) * p.n + n, count, [&](int i) {
          const float scaled = kBlocks ? sums[i] : __fmul_rn(sums[i], __fmul_rn(x_scale, w_scale[i]));
          return __fadd_rn(scaled, bias[i]);
        });
      }
    }
  }
};

}  // namespace gm::w8a8
#endif
