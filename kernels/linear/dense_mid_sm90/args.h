// Written by `make generate` from args.py, which declares these structs; do not edit.
#pragma once
#include <cstdint>

// The arguments of gm_dense_mid_sm90.
struct GmLinearDenseMidArgs {
  static constexpr uint64_t kDigest = 0x15c849d40b63e7f9;
  // ordinal; negative: the entry only answers with the bytes of shared memory of a CTA
  int32_t device;
  // a CUstream of the device
  void* stream;
  // [n, k], 16-byte aligned
  const void* w;
  // [m, k], rows ldx elements apart, 16-byte aligned
  const void* x;
  // in elements, a multiple of 8, k at least
  int64_t ldx;
  // [n] or null
  const void* bias;
  // as y, or null
  const void* residual;
  // [m, n], with silu_mul [m, n / 2]
  void* y;
  // 0 to 128
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
  // of W, of a CTA: 64, 128, 192 or 256
  int32_t rows;
  // CTAs of a cluster, along K: 1 to 8
  int32_t split;
  // of a multiprocessor, 1 to 4, which share its memory
  int32_t ctas;
};
