// Written by `make generate` from args.py, which declares these structs; do not edit.
#pragma once
#include <cstdint>

// The arguments of gm_linear_wv_splitk.
struct GmLinearWvSplitKArgs {
  static constexpr uint64_t kDigest = 0x77e07099a9e3ca77;
  int32_t device;
  // 0 dense, 1 int4, 2 int8
  int32_t format;
  // DTYPE_CODES
  int32_t x_type;
  int32_t lanes;
  void* stream;
  // gfx1100
  const char* arch;
  void* y;
  const void* x;
  const void* w;
  // [n, groups]; unused if dense
  const void* scales;
  // codes of the zero points [n, groups]; null: 2^(bits - 1)
  const uint8_t* zeros;
  // [n], null without
  const void* bias;
  // [m, columns of y], null without
  const void* residual;
  // of splits > 1: [splits, tiles, waves, 2 M]
  float* sums;
  // of splits > 1: [tiles], zero before and after
  uint32_t* counters;
  // elements between rows of x
  int64_t ldx;
  int32_t m, n, k;
  // columns of W per chunk of x in LDS
  int32_t chunk;
  // chunks per split
  int32_t per_split;
  int32_t splits, tiles, blocks;
  // a column k belongs to scale k >> group_shift of its row
  int32_t groups, group_shift;
  // DTYPE_CODES
  int32_t scale_type;
  // rows of W: gate, then up
  int32_t silu_mul;
  // rows of x are aligned to 16 bytes
  int32_t vectors;
};
