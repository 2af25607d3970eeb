// Parameters and shapes of the products of experts over dense weights, seen by the host and the device.
#pragma once
#include "moe/grouped_linear/frag16_sm90/grouped_tiles.cuh"

namespace gm::dense {

constexpr int kStep = 64;       // columns of a slot: 128 bytes, the width of the swizzle
constexpr int kBlockRows = 64;  // rows of W of one wgmma
constexpr int kBlockBytes = kBlockRows * kStep * 2;
constexpr int kTileInfos = 32;  // ring of tile coordinates; more than slots

struct Params {
  gm::GroupedParams list;       // offsets, experts, and tiles along N
  void* y;                      // [rows, out_n]
  const void* bias;             // [experts, n] or null
  int n, out_n;                 // rows of an expert's W; columns of y: n, or half of it with `gated`
  int rows;                     // of y
  int steps;                    // of kStep columns
  int next_index, next_parity;  // steps modulo the slots of the ring, and the parity of the rounds in them
  int gated;                    // silu(first half of the rows of W) * second half
  int clamp;                    // the other activation, as of swiglu.cuh
  float alpha, limit;
  int w_rows;        // of a block
  int lag;           // slots
  int early, clear;  // as of GroupedParams
};

// Rows of x of the narrowest of the WIDTHS of a product that holds `rows`; the last one holds all.
template <int... WIDTHS>
struct Widths {};

// A CTA of MT rows of x; GROUPS warpgroups with BLOCKS blocks of W each, and for each of those SLICES warpgroups, which
// take turns along K. CLUSTER: CTAs with neighbouring rows of W and the same rows of x, of which each copies a share to
// all. CTAS: per multiprocessor. SLOTS: of the ring. STAGED: rows of y that a warpgroup stages at a time.
template <int MT, int BLOCKS, int GROUPS, int SLICES, int CLUSTER, int CTAS, int SLOTS, int STAGED,
          typename WIDTHS>
struct Shape {
  using Widths = WIDTHS;
  static constexpr int kTokens = MT, kBlocks = BLOCKS, kGroups = GROUPS, kSlices = SLICES, kCluster = CLUSTER,
                       kCtas = CTAS, kSlots = SLOTS, kStaged = STAGED;
  static constexpr int kWarpgroups = GROUPS * SLICES, kThreads = kWarpgroups * 128 + 128;
  static constexpr int kWBlocks = BLOCKS * GROUPS;                 // of a tile
  static constexpr int kBox = MT >= 128 ? 32 : MT >= 64 ? 16 : 8;  // rows of x that are copied at a time
  static constexpr int kWSlot = kWBlocks * kBlockBytes, kXSlot = MT * kStep * 2;
  // Registers of a thread that multiplies and of one that copies; together no more than the CTA was launched with.
  static constexpr int kConsumerRegisters = kWarpgroups == 4 ? 112
                                            : CTAS == 2      ? 104
                                                             : 232,
                       kProducerRegisters = kWarpgroups == 4 || CTAS == 2 ? 32 : 40;
  // A warpgroup stages rows of 64 columns in two buffers in turn.
  static constexpr int kStageBytes = STAGED * 128;
  // A slice sends its sums in the layout of accumulators.
  static constexpr int kSums = SLICES > 1 ? BLOCKS * MT / 2 : 0,
                       kExchange = (SLICES - 1) * GROUPS * kSums * 512;
  static constexpr int kXRing = SLOTS * kWSlot, kStaging = kXRing + SLOTS * kXSlot,
                       kExchangeAt = kStaging + GROUPS * 2 * kStageBytes, kBars = kExchangeAt + kExchange,
                       kInfos = kBars + SLOTS * 16, kList = kInfos + kTileInfos * 16;
  static constexpr int smem(int experts) { return kList + 8 * (experts + 1); }
  static_assert(SLOTS < kTileInfos);
  static_assert(SLICES == 1 || (SLOTS % SLICES == 0 && BLOCKS == 1));
  static_assert(STAGED % 16 == 0 && MT % kBox == 0);
};

}  // namespace gm::dense
