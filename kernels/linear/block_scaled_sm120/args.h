// Written by `make generate` from args.py, which declares these structs; do not edit.
#pragma once
#include <cstdint>

// The arguments of gm_linear_<format>_sm120f.
struct GmLinearBlockScaledArgs {
  static constexpr uint64_t kDigest = 0x29b0f8315775e7d8;
  // ordinal; < 0: launch nothing, return the dynamic shared memory in bytes
  int32_t device;
  // a CUstream of the device
  void* stream;
  // [m, n]
  void* y;
  // [m, k] codes, packed, 16-byte aligned
  const void* x;
  // [n, k] codes, packed, 16-byte aligned
  const void* w;
  // [m, k / group], 8-byte aligned
  const void* x_scale;
  // [n, k / group], 8-byte aligned
  const void* w_scale;
  // of all of x, or null
  const float* x_factor;
  // [n] or null
  const float* w_factor;
  // [n] or null
  const void* bias;
  // [m, n] or null
  const void* residual;
  // one per tile of y that CTAs share, zero before and after; null if they share none
  uint32_t* counters;
  // partial sums of the CTAs that share a tile of y; null if they share none
  float* sums;
  // k: a multiple of 128
  int32_t m, n, k;
  // of y, bias and residual: 1 fp16, 2 bf16
  int32_t y_type;
  // the instance: rows of x per CTA; warps, 32 rows of W each
  int32_t mt, warps;
  // CTAs that walk over the tiles of y
  int32_t grid;
  // 1: tiles past the last whole wave are dealt out along K
  int32_t share;
};

// The arguments of gm_quantize_blocks_sm120f.
struct GmQuantizeBlocksArgs {
  static constexpr uint64_t kDigest = 0x1feff67751c67ab2;
  int32_t device;
  // k: a multiple of 128
  int32_t m, k;
  // 1 fp16, 2 bf16
  int32_t x_type;
  // of the codes: 0 nvfp4, 1 mxfp4, 2 mxfp8
  int32_t format;
  // nvfp4: 1 = a factor for each row, 0 = one of all of x
  int32_t by_row;
  // a CUstream of the device
  void* stream;
  // [m, k], packed
  void* codes;
  // [m, k / group]
  void* scales;
  // nvfp4: that of all of x, or [m], to write; else null
  float* factor;
  // nvfp4 with one factor: room for 256; else null
  float* maxima;
  // [m, k], rows ldx elements apart, 16-byte aligned
  const void* x;
  int64_t ldx;
};
