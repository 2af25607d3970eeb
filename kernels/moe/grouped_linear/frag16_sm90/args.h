// Written by `make generate` from args.py, which declares these structs; do not edit.
#pragma once
#include <cstdint>

// The arguments of every gm_grouped_linear_<format>_sm90.
struct GmGroupedFrag16Args {
  static constexpr uint64_t kDigest = 0x438fc6ad7b082794;
  // ordinal; < 0: launch nothing, return the dynamic shared memory in bytes
  int32_t device;
  // a CUstream of the device
  void* stream;
  // [rows, n or n / 2]
  void* y;
  // [x_rows, k], rows ldx elements apart
  const void* x;
  // in elements
  int64_t ldx;
  // [experts, n, k] as tiles of a frag16 layout
  const void* w;
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
  // of x and y: 1 fp16, 2 bf16
  int32_t x_type;
  // of 16-bit scales in the tiles: 1 fp16, 2 bf16, 0 none
  int32_t scale_type;
  // programmatic dependent launch
  int32_t pdl;
  // offsets are those of the launch before, which had them, too
  int32_t early;
  // rows of y past the last expert's become 0
  int32_t clear;

  // mt, c, slices, ctas name an instance

  // rows of x per tile
  int32_t mt;
  // blocks of 64 rows of W per CTA
  int32_t c;
  // warpgroups that take turns along K for each block
  int32_t slices;
  // CTAs per multiprocessor
  int32_t ctas;
  // CTAs that walk over the tiles of y, at most
  int32_t grid;
};
