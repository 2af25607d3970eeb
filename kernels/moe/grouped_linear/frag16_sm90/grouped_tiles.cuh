// Parameters and shapes of grouped_ws, and its tile scheduler: the list of tiles that every CTA builds from the offsets
// of the experts.
#pragma once
#include "linear/frag16_sm90/gemm_ws_tiles.cuh"

namespace gm {

struct GroupedParams {
  const uint8_t* w;        // tiles of all experts, `expert_bytes` apart
  void* y;                 // [rows, out_n]
  const void* x;           // rows that `permutation` gathers
  const int* offsets;      // [experts + 1]: rows of y of expert e are offsets[e] .. offsets[e + 1]
  const int* permutation;  // [rows]: row p of y is of row permutation[p] / top_k of x; null: of row p
  const float* row_scale;  // [experts, n], multiplies the sums of a row of W; or null
  int64_t expert_bytes;
  uint32_t x_chunks;                         // 16-byte chunks from a row of x to the next
  int rows, experts, n, k, groups, tiles16;  // n, tiles16: rows of an expert's W, tiles of 16 of them
  int out_n;                                 // columns of y: n, or half of it with `gated`
  int gated;                                 // silu(first half of the rows of W) * second half
  int blocks;                                // tiles of y along N
  int top_k;
  uint32_t by_blocks, by_top_k;  // see quotient
  int scales_half, vector;       // scales are fp16, not bf16; rows of y are 16-byte aligned
  int early;                     // the offsets were written by the kernel before the previous one
  int clear;                     // rows of y past the last expert's are zeroed
};

constexpr int kGatherWarps = 2;
constexpr int kTilesAhead = 32;  // ring of tile coordinates; more than slots of weights

// A CTA of MT rows of x, C blocks of 64 rows of W, and for each block SLICES warpgroups, which alternate groups of K.
// CTAS: per multiprocessor. One warpgroup owns the sums of a tile of y; the others send it theirs.
template <int MT, int C, int SLICES, int CTAS>
struct GroupedCta {
  static constexpr int kGroups = C * SLICES, kThreads = kGroups * 128 + 128;
  static constexpr int kConsumerRegisters = kGroups == 4 ? 112
                                            : CTAS == 2  ? 104
                                                         : 224,
                       kProducerRegisters = kGroups == 4 || CTAS == 2 ? 32 : 56;
  // Fragments of 8 rows of x; how many of them are exchanged, and stored, at a time.
  static constexpr int kFragments = MT / 8, kChunk = kFragments < 4 ? kFragments : 4,
                       kPairs = kChunk < 2 ? 1 : kChunk / 2;
  static constexpr int kSenders = C == 2 ? kGroups - 1 : (SLICES - 1) * C;
  static constexpr int kExchangeBytes = kChunk * 2048;  // bytes of a chunk of a warpgroup's sums
  static constexpr int kExchange = kSenders * kExchangeBytes, kStaging = C * 4 * 512 * kPairs;
  static constexpr int kBars(int xs, int ws) { return (xs + ws) * 16 + C * 4 * 16; }
  static constexpr int smem(int xs, int ws, int tile_bytes) {
    return xs * MT * kXSlotK * 2 + ws * C * 4 * tile_bytes + kExchange + kStaging + kBars(xs, ws) +
           kTilesAhead * 16;
  }
};

}  // namespace gm

#ifdef __CUDACC__
namespace gm {

// The tiles of all experts, in shared memory: expert e has the tiles first[e] .. first[e + 1] along M, which
// start at row starts[e] of y.
struct GroupedList {
  int* first;
  int* starts;

  // By all threads of a CTA. MT: rows of a tile.
  template <int MT>
  __device__ __forceinline__ void build(const GroupedParams& p) const {
    for (int e = threadIdx.x; e <= p.experts; e += blockDim.x) starts[e] = __ldcg(p.offsets + e);
    __syncthreads();
    if (threadIdx.x < 32) {
      const int each = (p.experts + 31) / 32, begin = min(threadIdx.x * each, p.experts),
                end = min(begin + each, p.experts);
      int mine = 0;
      for (int e = begin; e < end; ++e) mine += (starts[e + 1] - starts[e] + MT - 1) / MT;
      int inclusive = mine;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_up_sync(0xffffffffu, inclusive, step);
        if (threadIdx.x >= step) inclusive += before;
      }
      int tiles = inclusive - mine;
      for (int e = begin; e < end; ++e) {
        first[e] = tiles;
        tiles += (starts[e + 1] - starts[e] + MT - 1) / MT;
      }
      if (threadIdx.x == 31) first[p.experts] = tiles;
    }
    __syncthreads();
  }
};

struct GroupedTile {
  int expert, block, row, end, m_tiles;  // m_tiles: of the expert
};

// Tile `index` of y, by a whole warp. The tiles of an expert that share a block of W are consecutive.
template <int MT>
__device__ __forceinline__ GroupedTile grouped_tile(const GroupedParams& p, const GroupedList& list,
                                                    int index) {
  const int lane = threadIdx.x & 31, place = quotient(index, p.blocks, p.by_blocks);
  int expert = 0;
#pragma unroll 4
  for (int e = lane; e - lane < p.experts; e += 32)
    expert += __popc(__ballot_sync(0xffffffffu, e < p.experts && list.first[e + 1] <= place));
  const int first = list.first[expert], m_tiles = list.first[expert + 1] - first,
            rest = index - first * p.blocks, block = rest / m_tiles;
  const int start = list.starts[expert];
  return {expert, block, start + (rest - block * m_tiles) * MT, list.starts[expert + 1], m_tiles};
}

}  // namespace gm
#endif
