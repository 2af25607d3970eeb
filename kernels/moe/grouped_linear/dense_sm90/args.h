// Written by `make generate` from args.py, which declares these structs; do not edit.
#pragma once
#include <cstdint>

// The arguments of every gm_grouped_dense_<type>_sm90.
struct GmGroupedDenseArgs {
  static constexpr uint64_t kDigest = 0x395c1c41ce71136e;
  // ordinal; < 0: launch nothing, return the dynamic shared memory in bytes
  int32_t device;
  // a CUstream of the device
  void* stream;
  // [rows, n or n / 2], contiguous
  void* y;
  // [x_rows, k], sorted by expert, rows ldx elements apart
  const void* x;
  // in elements
  int64_t ldx;
  // [experts, n, k], contiguous
  const void* w;
  // [experts, n], or null
  const void* bias;
  // [experts + 1]: expert e has the rows offsets[e] .. offsets[e + 1] of x and y
  const int32_t* offsets;
  int32_t rows;
  int32_t x_rows;
  int32_t experts;
  // rows of an expert's W
  int32_t n;
  int32_t k;
  // y = silu(first half of the rows of W) * second half
  int32_t silu_mul;
  // instead g sigmoid(alpha g) (u + 1), g = min(gate, limit) and u = up within -limit .. limit
  int32_t clamp;
  float alpha;
  float limit;
  // programmatic dependent launch
  int32_t pdl;
  // offsets are those of the launch before, which had them, too
  int32_t early;
  // rows of y past the last expert's become 0
  int32_t clear;

  // mt, blocks, groups, slices, cluster name an instance

  // rows of x per tile, at most
  int32_t mt;
  // blocks of rows of W per warpgroup
  int32_t blocks;
  // warpgroups with blocks of their own
  int32_t groups;
  // warpgroups that take turns along K for each of those
  int32_t slices;
  // CTAs that share rows of x: 1 or 2
  int32_t cluster;
  // rows of W of a block: 16, 32, 48 or 64
  int32_t w_rows;
  // slots by which the second warpgroup begins after the first
  int32_t lag;
  // CTAs that walk over the tiles of y, at most
  int32_t grid;
};
