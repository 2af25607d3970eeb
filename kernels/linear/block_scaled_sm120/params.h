// Kernel parameters, seen by both the host and the device.
#pragma once
#include <cstdint>

namespace gm::block_scaled {

constexpr int kWarpTiles = 2;               // tiles of 16 rows of W per warp
constexpr int kWarpRows = kWarpTiles * 16;  // rows of W per warp

struct Params {
  void* y;                  // [m, n]
  const void* bias;         // [n] or null
  const void* residual;     // [m, n] or null
  const uint8_t* x;         // [m, k] codes, packed, 16-byte aligned
  const uint8_t* w;         // [n, k] codes, packed, 16-byte aligned
  const uint8_t* x_scale;   // [m, k / group]
  const uint8_t* w_scale;   // [n, k / group]
  const float* x_factor;    // of all of x, or null
  const float* w_factor;    // [n] or null
  uint32_t* counters;       // [tiles of y that CTAs share], zero before and after
  void* sums;               // float [CTAs][2][warps][tiles of 16][MT / 8][32 lanes][4]
  int m, n, k, groups;      // groups: slots of 128 columns
  int high, blocks, whole;  // tiles of y along M, all of them, and those that are not shared
  int half, vectors;        // y is fp16, else bf16; rows of y and residual are 16-byte aligned
};

}  // namespace gm::block_scaled
