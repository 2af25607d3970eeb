// Kernel parameters, seen by both the host and the device.
#pragma once
#include <cstdint>

namespace gm::w8a8 {

constexpr int kWarpTiles = 2;               // tiles of 16 rows of W per warp
constexpr int kWarpRows = kWarpTiles * 16;  // rows of W per warp

struct Params {
  void* y;               // [m, n]
  const void* bias;      // [n] or null
  const void* residual;  // [m, n] or null
  const uint8_t* x;      // int8 [m, k], rows ldx apart, 16-byte aligned
  const uint8_t* w;      // [n, k], codes offset by 128, 16-byte aligned
  const float* x_scale;  // [m]
  const void* w_scale;   // [n]
  uint32_t* counters;    // [tiles of y that CTAs share], zero before and after
  int32_t* sums;         // [CTAs][2][warps][tiles of 16][MT / 8][32 lanes][4]
  int64_t ldx;
  int m, n, k, groups;      // groups: slots of columns
  int high, blocks, whole;  // tiles of y along M, all of them, and those that are not shared
  int w_type;               // of w_scale: 0 float32, 1 fp16, 2 bf16
  int half, vectors;        // y is fp16, else bf16; rows of y and residual are 16-byte aligned
};

}  // namespace gm::w8a8
