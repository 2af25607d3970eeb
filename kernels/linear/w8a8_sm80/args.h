// Written by `make generate` from args.py, which declares these structs; do not edit.
#pragma once
#include <cstdint>

// The arguments of gm_w8a8_linear_int8_sm80 and of its twins for other operands.
struct GmLinearW8a8Sm80Args {
  static constexpr uint64_t kDigest = 0x53ade5b1b954caeb;
  // ordinal; < 0: launch nothing, return the dynamic shared memory in bytes
  int32_t device;
  // a CUstream of the device
  void* stream;
  // [m, n]
  void* y;
  // codes [m, k], rows ldx apart, 16-byte aligned
  const void* x;
  // a multiple of 16
  int64_t ldx;
  // codes [n, k], int8 ones offset by 128
  const void* w;
  // float32 [m], or [1]; of blocks [k blocks, x_pitch]
  const void* x_scale;
  // [n]; of blocks [block rows, k blocks]
  const void* w_scale;
  // of blocks: int32 [n]
  const void* row_block;
  // [n] or null
  const void* bias;
  // [m, n] or null
  const void* residual;
  // one per tile of y that CTAs share, zero before and after; null if they share none
  uint32_t* counters;
  // partial sums of the CTAs that share a tile of y; null if they share none
  void* sums;
  int32_t m, n, k;
  // of y, bias and residual: 1 fp16, 2 bf16
  int32_t y_type;
  // of w_scale: 0 float32, 1 fp16, 2 bf16
  int32_t w_type;
  // 0: x_scale has one number, 1: one for each row
  int32_t x_step;
  // of blocks: floats from one k block of x_scale to the next, a multiple of 4
  int32_t x_pitch;
  // the instance: rows of x per CTA; warps, 32 rows of W each
  int32_t mt, warps;
  // CTAs that walk over the tiles of y
  int32_t grid;
  // 1: tiles past the last whole wave are dealt out along K
  int32_t share;
};

// The arguments of gm_quantize_int8_sm80.
struct GmQuantizeInt8Sm80Args {
  static constexpr uint64_t kDigest = 0x7076b133885453d7;
  int32_t device;
  // k: a multiple of 16
  int32_t m, k;
  // 1 fp16, 2 bf16
  int32_t x_type;
  // a CUstream of the device
  void* stream;
  // int8 [m, k]
  void* codes;
  // [m]
  float* scales;
  // [m, k], rows ldx elements apart, 16-byte aligned
  const void* x;
  int64_t ldx;
};

// The arguments of gm_quantize_fp8_sm89.
struct GmQuantizeFp8Sm89Args {
  static constexpr uint64_t kDigest = 0xcfb8c681f54526c;
  int32_t device;
  // k: a multiple of 16
  int32_t m, k;
  // 0 fp8_token (scales [m]), 1 fp8_g128 (scales [groups, pitch]), 2 fp8 (scales [m], all alike)
  int32_t format;
  // fp8_g128: floats from one group of scales to the next
  int32_t pitch;
  // 1 fp16, 2 bf16
  int32_t x_type;
  // a CUstream of the device
  void* stream;
  // e4m3 [m, k]
  void* codes;
  float* scales;
  // fp8: room for 256
  float* maxima;
  // [m, k], rows ldx elements apart, 16-byte aligned
  const void* x;
  int64_t ldx;
};
