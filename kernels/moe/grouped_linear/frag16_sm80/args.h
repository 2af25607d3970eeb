// Written by `make generate` from args.py, which declares these structs; do not edit.
#pragma once
#include <cstdint>

// The arguments of every gm_grouped_linear_<format>_sm80.
struct GmGroupedFrag16Sm80Args {
  static constexpr uint64_t kDigest = 0x47b5766c0a2d229f;
  // ordinal; < 0: launch nothing, return the dynamic shared memory in bytes
  int32_t device;
  // a CUstream of the device
  void* stream;
  // [rows, n or n / 2]; rows past the last expert's become 0
  void* y;
  // [x_rows, k], rows ldx elements apart
  const void* x;
  // in elements
  int64_t ldx;
  // [experts, n, k] as tiles of a frag16 layout
  const void* w;
  // [experts, n] or null
  const void* bias;
  // [experts, n], multiplies the sums of a row of W; or null
  const float* row_scale;
  // [experts + 1]: expert e has the rows offsets[e] .. offsets[e + 1] of y
  const int32_t* offsets;
  // [rows]: row p of y is of row permutation[p] / top_k of x; null: of row p
  const int32_t* permutation;
  int32_t rows;
  int32_t x_rows;
  int32_t experts;
  // rows of an expert's W
  int32_t n;
  int32_t k;
  int32_t top_k;
  // y = silu(first half of the rows of W) * second half
  int32_t silu_mul;
  // with silu_mul: the clamped form of gpt-oss, by alpha and limit
  int32_t clamp;
  float alpha;
  float limit;
  // of x, y and bias: 1 fp16, 2 bf16
  int32_t x_type;
  // of 16-bit scales in the tiles: 1 fp16, 2 bf16, 0 none
  int32_t scale_type;

  // mt, warps name an instance

  // rows of x per tile
  int32_t mt;
  // per CTA, two tiles of 16 rows of W each
  int32_t warps;
  // CTAs that walk over the tiles of y, at most
  int32_t grid;
};
