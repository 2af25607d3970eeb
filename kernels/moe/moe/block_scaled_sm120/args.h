// Written by `make generate` from args.py, which declares these structs; do not edit.
#pragma once
#include <cstdint>

// The arguments of gm_grouped_<format>_sm120f.
struct GmGroupedBlockScaledArgs {
  static constexpr uint64_t kDigest = 0x40662bf699f48b4c;
  // ordinal; < 0: launch nothing, return the dynamic shared memory in bytes
  int32_t device;
  // a CUstream of the device
  void* stream;
  // [rows, n or n / 2], 8-byte aligned; rows past the last expert's are not written
  void* y;
  // [x_rows, k] codes, packed, 16-byte aligned
  const void* x;
  // [experts, n, k] codes, packed, 16-byte aligned
  const void* w;
  // [x_rows, k / group], 8-byte aligned
  const void* x_scale;
  // [experts, n, k / group], 8-byte aligned
  const void* w_scale;
  // [x_rows] or null
  const float* x_factor;
  // [experts, n] or null
  const float* w_factor;
  // [experts, n] or null
  const void* bias;
  // [experts + 1]: expert e has the rows offsets[e] .. offsets[e + 1] of y
  const int32_t* offsets;
  // [rows]: row p of y is of row permutation[p] / top_k of x; null: of row p
  const int32_t* permutation;
  int32_t rows;
  int32_t experts;
  // rows of an expert's W; with silu_mul a multiple of 32, else of 8
  int32_t n;
  // a multiple of 128
  int32_t k;
  int32_t top_k;
  // y = silu(first half of the rows of W) * second half
  int32_t silu_mul;
  // with silu_mul: the clamped form of gpt-oss, by alpha and limit
  int32_t clamp;
  float alpha;
  float limit;
  // of y and bias: 1 fp16, 2 bf16
  int32_t y_type;
  // the instance: rows of x per tile; warps, 32 rows of W each
  int32_t mt, warps;
  // CTAs that walk over the tiles of y, at most
  int32_t grid;
};
