// Scales of 128 x 128 blocks of W in the main loops of 8-bit products.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "pipeline.cuh"

#ifdef __CUDACC__
#include <type_traits>

namespace gm::w8a8 {

// A number of fp16 (half) or bf16.
__device__ __forceinline__ float widened(const void* from, int64_t index, int half) {
  return half ? __half2float(static_cast<const __half*>(from)[index])
              : __bfloat162float(static_cast<const __nv_bfloat16*>(from)[index]);
}

// A scale of W, of any float type.
__device__ __forceinline__ float scale_at(const Params& p, int64_t index) {
  return p.w_type == 0 ? __ldg(static_cast<const float*>(p.w_scale) + index)
                       : widened(p.w_scale, index, p.w_type == 1);
}

// W's scales by blocks of k. The rows of W of a warp usually share a block row: lanes then hold its scales of
// consecutive blocks, which are broadcast by shuffles. They are constant, and prefetched before the tile begins, with
// the block row predicted as n / 128.
template <class S>
struct LaneScales {
  // Rows of W per lane, and lanes that have rows of their own.
  static constexpr int kEach = S::kStraddles ? 8 : S::kPlain ? S::kColumns / 32 : 1;
  static constexpr int kLanes = S::kPlain ? S::kColumns / kEach : 16;
  float now = 0.f, ahead = 0.f;  // of 32 blocks of k, and of the next 32
  int block_row = 0, next = 0;   // next: of the lane's rows of W in the next tile, -1 if they differ
  bool same = true;
  __device__ __forceinline__ static int predicted_row(const Params& p, int n) {
    return min(n, p.n - 1) / 128;
  }
  __device__ __forceinline__ static float lane_scale(const Params& p, int block, int k) {
    const int mine = k + (threadIdx.x & 31);
    return mine < p.k_blocks ? scale_at(p, block * p.k_blocks + mine) : 0.f;
  }
  // Prefetches the block rows of the next tile, in which the warp's rows of W begin at n; prefetch_scales is called
  // between the loads.
  template <typename Prefetch>
  __device__ __forceinline__ void load_rows(const Params& p, int n, const Prefetch& prefetch_scales) {
    const int lane = threadIdx.x & 31;
    const int row = n + (S::kStraddles ? min(lane, kLanes - 1) : lane & (kLanes - 1)) * kEach;
    next = __ldg(p.row_block + min(row, p.n - 1));
    prefetch_scales();
#pragma unroll
    for (int i = 1; i < kEach; ++i)
      if (__ldg(p.row_block + min(row + i, p.n - 1)) != next) next = -1;
  }
  // The block row of the warp's first row of W, which all of them have if `same`.
  __device__ __forceinline__ int begin_rows() {
    const int block = __shfl_sync(0xffffffffu, next, 0);
    same = __all_sync(0xffffffffu, next >= 0 && next == block);
    return block;
  }
  // The scale of all rows, if they share one. Called once for each k, in order.
  __device__ __forceinline__ float at(const Params& p, int k, int first) {
    const int place = (k - first) & 31;
    if (place == 0 && k > first) now = ahead, ahead = lane_scale(p, block_row, k + 32);
    return __shfl_sync(0xffffffffu, now, place);
  }
  // The scale of row n, if they do not.
  __device__ __forceinline__ static float of_row(const Params& p, int n, int k) {
    return scale_at(p, __ldg(p.row_block + min(n, p.n - 1)) * p.k_blocks + k);
  }
};

// With scales of 64 blocks of k prefetched for the next tile.
template <class S>
struct BlockScales : LaneScales<S> {
  using Lane = LaneScales<S>;
  using Lane::now, Lane::ahead, Lane::block_row, Lane::same, Lane::lane_scale;
  float next_now = 0.f, next_ahead = 0.f;
  int predicted = 0;
  __device__ __forceinline__ void prefetch(const Params& p, int n, int first) {
    predicted = Lane::predicted_row(p, n);
    next_now = lane_scale(p, predicted, first), next_ahead = lane_scale(p, predicted, first + 32);
  }
  // Begins a tile whose rows are in `block`, if they are in one.
  __device__ __forceinline__ void start(const Params& p, bool known, int block, int first) {
    now = next_now, ahead = next_ahead;
    if (known && block != predicted) {
      predicted = block;
      now = lane_scale(p, predicted, first), ahead = lane_scale(p, predicted, first + 32);
    }
    block_row = predicted;
  }
  // Prefetches for the next tile, in which the warp's rows of W begin at n.
  __device__ __forceinline__ void load(const Params& p, int n, int first) {
    this->load_rows(p, n, [&] { prefetch(p, n, first); });
  }
  __device__ __forceinline__ void begin(const Params& p, int first) {
    const int block = this->begin_rows();
    start(p, same, block, first);
  }
};

// Where x is operand A, in fewer registers: a lane holds the scales of the next tile's first 32 blocks of k only. (A load
// by all lanes from one address would be waited for at once, because the result becomes a uniform register.)
template <class S>
struct TileScales : LaneScales<S> {
  using Lane = LaneScales<S>;
  using Lane::now, Lane::ahead, Lane::block_row, Lane::same, Lane::lane_scale;
  float first = 0.f;
  // Of the next tile, which begins at n.
  __device__ __forceinline__ void load(const Params& p, int n) {
    this->load_rows(p, n, [&] { first = lane_scale(p, Lane::predicted_row(p, n), 0); });
  }
  __device__ __forceinline__ void begin(const Params& p, int n) {
    block_row = this->begin_rows();
    if (same) {
      now = block_row == Lane::predicted_row(p, n) ? first : lane_scale(p, block_row, 0);
      ahead = lane_scale(p, block_row, 32);
    }
  }
};

// Where a tile may have rows of two blocks (`same`): the first 32 times `leading` of them are in one, all others in the next.
template <class S>
struct StraddlingScales : BlockScales<S> {
  using Block = BlockScales<S>;
  BlockScales<S> other;
  int leading = 0;
  __device__ __forceinline__ void load(const Params& p, int n, int first) {
    this->load_rows(p, n, [&] {
      this->prefetch(p, n, first);
      other.prefetch(p, n + S::kColumns - 1, first);
    });
  }
  __device__ __forceinline__ void begin(const Params& p, int first) {
    constexpr unsigned kAll = (1u << Block::kLanes) - 1;
    const int block = __shfl_sync(0xffffffffu, this->next, 0);
    const int last = __shfl_sync(0xffffffffu, this->next, Block::kLanes - 1);
    const unsigned of_block = __ballot_sync(0xffffffffu, this->next == block) & kAll;
    const unsigned of_last = __ballot_sync(0xffffffffu, this->next == last) & kAll;
    const int lanes = __popc(of_block);
    leading = lanes / 4;
    this->same = block >= 0 && last >= 0 && lanes % 4 == 0 && (of_block & (of_block + 1)) == 0 &&
                 (of_block | of_last) == kAll;
    this->start(p, this->same, block, first);
    other.start(p, this->same, last, first);
  }
};

template <class S>
using ScalesOf = std::conditional_t<S::kStraddles, StraddlingScales<S>, BlockScales<S>>;

// Scales of the products of a block of k with 64 rows of A.
template <class S>
struct Factors {
  // W's scale if its rows share one; PLAIN: times those of the thread's two tokens.
  float w = 1.f, of[2] = {};
  float other_w = 1.f;  // of a straddling tile's further rows
  // row: the thread's first row of A, counted from the tile's; x_scales: the slot's.
  __device__ __forceinline__ void load(float scale, int row, uint32_t x_scales) {
    w = scale;
    if constexpr (S::kPlain)
      of[0] = ld_shared<float>(x_scales + row * 4), of[1] = ld_shared<float>(x_scales + (row + 8) * 4);
  }
};

}  // namespace gm::w8a8
#endif
