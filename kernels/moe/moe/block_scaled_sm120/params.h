// Kernel parameters, seen by both the host and the device.
#pragma once
#include <cstdint>

namespace gm::block_scaled {

struct ExpertParams {
  void* y;                 // [rows, out_n]; rows past the last expert's are not written
  const void* bias;        // [experts, n] or null
  const uint8_t* x;        // [x_rows, k] codes, packed, 16-byte aligned
  const uint8_t* w;        // [experts, n, k] codes, packed, 16-byte aligned
  const uint8_t* x_scale;  // [x_rows, k / group]
  const uint8_t* w_scale;  // [experts, n, k / group]
  const float* x_factor;   // [x_rows] or null
  const float* w_factor;   // [experts, n] or null
  const int* offsets;      // [experts + 1]: rows of y of expert e are offsets[e] .. offsets[e + 1]
  const int* permutation;  // [rows]: row p of y is of row permutation[p] / top_k of x; null: of row p
  int experts, n, slots;   // n: rows of an expert's W; slots of 128 columns
  int out_n, blocks;       // columns of y: n, or half of it with `gated`; tiles of y along them
  int top_k;
  int gated, clamp;    // silu(first half of the rows of W) * second half; its clamped form
  float alpha, limit;  // of the clamped form
  int half;            // y is fp16, else bf16
};

// Bytes behind the ring of slots in shared memory: the list of tiles, and the factors of a tile's rows of x.
constexpr int behind_ring(int experts, int mt) { return 8 * (experts + 1) + 4 * mt; }

}  // namespace gm::block_scaled
