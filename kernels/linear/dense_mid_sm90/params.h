// Parameters and shapes of dense products of a few dozen rows, seen by the host and the device.
#pragma once
#include <cstdint>

namespace gm::dense_mid {

constexpr int kStep = 64;         // columns of a slot: 128 bytes, the width of the swizzle
constexpr int kBlockRows = 64;    // rows of W of one wgmma
constexpr int kRing = 1024;       // where slots begin, behind the barriers
constexpr int kMostSlots = 64;    // whose barriers fit before them
constexpr int kMostSplit = 8;     // CTAs of a portable cluster
constexpr int kMostRows = 128;    // of x
constexpr int kMostShared = 227;  // KB of a CTA
constexpr int kProcessor = 228;   // KB of a multiprocessor, of which each CTA takes one beside its own

struct Params {
  void* y;
  const void* bias;
  const void* residual;
  int m, n, out_n;  // rows of x; rows of W; columns of y: n, or half of it with `gated`
  int steps;        // of kStep columns
  int slots;        // of the ring
  int split;        // CTAs of a cluster
  int gated;        // silu(first half of the rows of W) * second half
  int vectors;      // four numbers of y, bias and residual are aligned
};

// WIDTH rows of x, ROWS rows of W of a CTA.
template <int WIDTH, int ROWS>
struct Shape {
  static constexpr int kWidth = WIDTH, kRows = ROWS;
  static constexpr int kConsumers = ROWS / kBlockRows * 128, kThreads = kConsumers + 32;
  static constexpr int kWSlot = ROWS * kStep * 2, kXSlot = WIDTH * kStep * 2, kSlot = kWSlot + kXSlot;
  // Sums in shared memory: rows of W of a row of x after the other. Eight rows of W of four pairs of rows of x, which a warp
  // writes at a time, are in different banks.
  static constexpr int kPitch = ROWS + 4, kSums = WIDTH * kPitch * 4;
  // CTAs of a multiprocessor that registers are left for.
  static constexpr int kCtas = ROWS == 64    ? 4
                               : ROWS == 128 ? (WIDTH > 64 ? 2 : 3)
                               : ROWS == 192 ? (WIDTH > 64 ? 1 : 2)
                                             : 1;
  static_assert(ROWS % kBlockRows == 0 && ROWS <= 256 && WIDTH % 16 == 0);
  // Slots where `ctas` of them share a multiprocessor.
  static constexpr int slots(int ctas) {
    const int each = (kProcessor / ctas - 1) * 1024 - kRing, slots = each / kSlot;
    return slots < kMostSlots ? slots : kMostSlots;
  }
  static constexpr int smem(int slots) {
    const int ring = slots * kSlot;
    return kRing + (ring > kSums ? ring : kSums);
  }
};

}  // namespace gm::dense_mid
