// Kernel parameters, seen by both the host and the device.
#pragma once
#include <cstdint>

namespace gm::w8a8 {

constexpr int kBlockK = 128;  // columns of a slot of the rings, and of a block of scales

struct Params {
  void* y;               // [m, n]
  const void* bias;      // [n] or null
  const void* residual;  // [m, n] or null
  const float* x_scale;  // [m]; with block scales [k_blocks, x_pitch]
  const int* x_sum;      // int8: [m], sums of the rows of x
  const void* w_scale;   // [n]; with block scales [block rows, k_blocks]
  const int* row_block;  // with block scales: [n], the block row of each row of W
  int m, n, k_blocks;
  int n_tiles, m_tiles, band;  // band: tiles along m of a raster band
  int slots, log_split;
  int x_pitch;
  int w_type;        // of w_scale: 0 float32, 1 fp16, 2 bf16
  int half, vector;  // y is fp16, else bf16; rows of y take 16-byte stores
};

}  // namespace gm::w8a8
