// The arguments and outputs of combine, as its native kernels get them. Written by `make generate` from the
// declaration of the operation; do not edit. kernel_registry/call_struct.py has the rules.
#pragma once
#include <cstdint>

struct GmCombineCall {
  static constexpr uint64_t kDigest = 0x91117f9d6cf72d6;
  // [rows, h]
  const void* y;
  // [(m*top_k)]
  const void* inverse;
  // [m, top_k]
  const void* weights;
  // [m, h]
  void* out;
  int64_t rows;
  int64_t h;
  int64_t m;
  int64_t top_k;
  // of y
  int64_t x_type;
};
