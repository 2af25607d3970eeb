// Written by `make generate` from args.py, which declares these structs; do not edit.
#pragma once
#include <cstdint>

// The arguments of every gm_linear_<format>_<schedule>_sm80.
struct GmLinearFrag16Sm80Args {
  static constexpr uint64_t kDigest = 0x6401c6bda3fed697;
  // ordinal; < 0: launch nothing, return the dynamic shared memory in bytes
  int32_t device;
  // a CUstream of the device
  void* stream;
  // [m, n]
  void* y;
  // [m, k], rows ldx elements apart
  const void* x;
  // in elements
  int64_t ldx;
  // [n, k] as tiles of a frag16 layout
  const void* w;
  // [n] or null
  const void* bias;
  // [m, n] or null
  const void* residual;
  // [n], multiplies the sums of a row of W; or null
  const float* row_scale;
  // one per tile of y that CTAs share, zero before and after; null if they share none
  uint32_t* counters;
  // partial sums of the CTAs that share a tile of y; null if they share none
  float* sums;
  int32_t m;
  int32_t n;
  int32_t k;
  // of x, y, bias and residual: 1 fp16, 2 bf16
  int32_t x_type;
  // of 16-bit scales in the tiles: 1 fp16, 2 bf16, 0 none
  int32_t scale_type;

  // decode; nt, rt, wk name an instance

  // CTAs that share a tile of y along K
  int32_t split;
  // columns of x in eights
  int32_t nt;
  // tiles of 16 rows of W per warp
  int32_t rt;
  // warps along K
  int32_t wk;

  // gemm; mt, warps name an instance

  // rows of x per CTA
  int32_t mt;
  // per CTA, 32 rows of W each
  int32_t warps;
  // CTAs that walk over the tiles of y
  int32_t grid;
  // 1: tiles past the last whole wave are dealt out along K
  int32_t share;
};
