// Written by `make generate` from args.py, which declares these structs; do not edit.
#pragma once
#include <cstdint>

// The arguments of every gm_linear_<format>_<schedule>_sm90. A schedule reads the fields it has use for;
// instances.json says which of them name an instance.
struct GmLinearFrag16Args {
  static constexpr uint64_t kDigest = 0x16ce04b77fd3041d;
  // ordinal; < 0: launch nothing, return the dynamic shared memory in bytes
  int32_t device;
  // a CUstream of the device
  void* stream;
  // [m, n], with `gated` [m, n / 2]
  void* y;
  // [m, k], rows ldx elements apart
  const void* x;
  // in elements
  int64_t ldx;
  // [n, k] as tiles of a frag16 layout
  const void* w;
  // [n] or null
  const void* bias;
  // of the shape of y, or null
  const void* residual;
  // [n], multiplies the sums of a row of W; or null
  const float* row_scale;
  // gemm_ws with `even`: flag_bytes zeros, then grid * mt * c * 256 bytes
  void* scratch;
  int32_t m;
  int32_t n;
  int32_t k;
  // of x, y, bias and residual: 1 fp16, 2 bf16
  int32_t x_type;
  // of 16-bit scales in the tiles: 1 fp16, 2 bf16, 0 none
  int32_t scale_type;
  // programmatic dependent launch
  int32_t pdl;
  // CTAs of a cluster that share a tile of y along K: 1, 2, 4 or 8
  int32_t split;

  // decode and decode_ws; nt, rt, wn, wk name an instance

  // columns of x in eights
  int32_t nt;
  // tiles of 16 rows of W per warp
  int32_t rt;
  // warps along N (decode_ws)
  int32_t wn;
  // warps along K
  int32_t wk;
  // slots of the ring of weights: of a warp (decode), of a CTA, a multiple of wk (decode_ws)
  int32_t depth;

  // gemm_ws; mt, c, slices, ctas name an instance

  // rows of x per CTA
  int32_t mt;
  // blocks of 64 rows of W per CTA
  int32_t c;
  // warpgroups that take turns along K for each block
  int32_t slices;
  // CTAs per multiprocessor
  int32_t ctas;
  // CTAs that walk over the tiles of y
  int32_t grid;
  // tiles along M that follow each other in time
  int32_t raster;
  // the last tiles are dealt out along K: 0 not, 1 one or two per CTA, 2 the remainder
  int32_t even;
  // groups of 128 k that one half of a CTA's warpgroups stays behind the other
  int32_t lag;
  // y = silu(gate) * up, [m, n / 2], of the two halves of the rows of w; n is a multiple of 64
  int32_t gated;
};

// The arguments of gm_gather_columns_sm90.
struct GmGatherColumnsArgs {
  static constexpr uint64_t kDigest = 0x45e0b4513e909732;
  int32_t device;
  int32_t m;
  int32_t columns;
  // a CUstream of the device
  void* stream;
  // [m, columns] of 16-bit values
  void* out;
  // [m, ...], rows ldx elements apart
  const void* x;
  int64_t ldx;
  // [columns]
  const int32_t* perm;
};
