// Kernel parameters, seen by both the host and the device.
#pragma once
#include <cstdint>

namespace gm::w8a8 {

constexpr int kWarpTiles = 2;               // tiles of 16 rows of W per warp
constexpr int kWarpRows = kWarpTiles * 16;  // rows of W per warp
constexpr int kBlock = 128;                 // columns of a block of scales

struct Params {
  void* y;               // [m, n]
  const void* bias;      // [n] or null
  const void* residual;  // [m, n] or null
  const uint8_t* x;      // codes [m, k], rows ldx apart, 16-byte aligned
  const uint8_t* w;      // codes [n, k], int8 ones offset by 128, 16-byte aligned
  const float* x_scale;  // [m], or one for all rows; of blocks [k_blocks, x_pitch]
  const void* w_scale;   // [n]; of blocks [block rows, k_blocks]
  const int* row_block;  // of blocks: [n], the block row of each row of W
  uint32_t* counters;    // [tiles of y that CTAs share], zero before and after
  void* sums;            // [CTAs][2][warps][tiles of 16][MT / 8][32 lanes][4], of 4 bytes
  int64_t ldx;
  int m, n, k, groups;      // groups: slots of columns
  int high, blocks, whole;  // tiles of y along M, all of them, and those that are not shared
  int w_type;               // of w_scale: 0 float32, 1 fp16, 2 bf16
  int x_step;               // 0: one scale for all rows of x, else 1
  int k_blocks, x_pitch;    // of blocks; x_pitch: a multiple of 4
  int half, vectors;        // y is fp16, else bf16; rows of y and residual are 16-byte aligned
};

}  // namespace gm::w8a8
