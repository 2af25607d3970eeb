// Written by `make generate` from args.py, which declares these structs; do not edit.
#pragma once
#include <cstdint>

// The arguments of gm_moe_rows_sm90: row p of y is row permutation[p] / top_k of x, for p < *last.
struct GmMoeRowsArgs {
  static constexpr uint64_t kDigest = 0x7ad32e9d722666ac;
  int32_t device;
  // a multiple of 8
  int32_t columns;
  int32_t top_k;
  // a CUstream of the device
  void* stream;
  // [tokens, columns] of 16-bit floats, rows ldx elements apart
  const void* x;
  int64_t ldx;
  // [entries, columns]
  void* y;
  // [entries]
  const int32_t* permutation;
  const int32_t* last;
  int64_t entries;
};
