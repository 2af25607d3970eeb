// Written by `make generate` from args.py, which declares these structs; do not edit.
#pragma once
#include <cstdint>

// The arguments of gm_dense_decode_sm90.
struct GmLinearDenseArgs {
  static constexpr uint64_t kDigest = 0x5f58d06e5ac4a070;
  // ordinal
  int32_t device;
  // a CUstream of the device
  void* stream;
  // [n, k], 16-byte aligned
  const void* w;
  // [m, k], rows ldx elements apart, 16-byte aligned
  const void* x;
  // in elements, a multiple of 8
  int64_t ldx;
  // [n] or null
  const void* bias;
  // as y, or null
  const void* residual;
  // [m, n], with silu_mul [m, n / 2]
  void* y;
  // 0 to 16
  int32_t m;
  int32_t n;
  // a multiple of 8
  int32_t k;
  // of all tensors: 1 fp16, 2 bf16
  int32_t type;
  // y = silu(z[:, : n / 2]) * z[:, n / 2 :]
  int32_t silu_mul;
  // programmatic dependent launch
  int32_t pdl;
  // tiles of 16 rows of W per warp: 1 or 2
  int32_t rt;
  // warps of a CTA, along K: 1 to 8
  int32_t wk;
  // CTAs of a cluster, along K: 1, 2, 4 or 8
  int32_t split;
};
