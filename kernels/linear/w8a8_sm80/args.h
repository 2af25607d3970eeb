// Written by `make generate` from args.py, which declares these structs; do not edit.
#pragma once
#include <cstdint>

// The arguments of gm_w8a8_linear_sm80.
struct GmLinearW8a8Sm80Args {
  static constexpr uint64_t kDigest = 0x19823fc588e55946;
  // ordinal; < 0: launch nothing, return the dynamic shared memory in bytes
  int32_t device;
  // a CUstream of the device
  void* stream;
  // [m, n]
  void* y;
  // int8 [m, k], rows ldx apart, 16-byte aligned
  const void* x;
  // a multiple of 16
  int64_t ldx;
  // [n, k], codes offset by 128
  const void* w;
  // float32 [m]
  const void* x_scale;
  // [n]
  const void* w_scale;
  // [n] or null
  const void* bias;
  // [m, n] or null
  const void* residual;
  // one per tile of y that CTAs share, zero before and after; null if they share none
  uint32_t* counters;
  // partial sums of the CTAs that share a tile of y; null if they share none
  int32_t* sums;
  int32_t m, n, k;
  // of y, bias and residual: 1 fp16, 2 bf16
  int32_t y_type;
  // of w_scale: 0 float32, 1 fp16, 2 bf16
  int32_t w_type;
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
