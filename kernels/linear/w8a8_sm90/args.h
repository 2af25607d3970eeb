// Written by `make generate` from args.py, which declares these structs; do not edit.
#pragma once
#include <cstdint>

// The arguments of every gm_linear_w8a8_<format>_sm90.
struct GmLinearW8a8Args {
  static constexpr uint64_t kDigest = 0x62080b736c747d6;
  // ordinal; -1: nothing is launched, the bytes of shared memory are returned
  int32_t device;
  // CUstream
  void* stream;
  // [m, n] contiguous
  void* y;
  // [m, k] 8-bit values, rows ldx apart
  const void* x;
  int64_t ldx;
  // [n, k] contiguous
  const void* w;
  // float32 [m], or [k blocks, x_pitch]
  const void* x_scale;
  // int32 [m]: int8 only
  const void* x_sum;
  // [n], or [block rows, k blocks]
  const void* w_scale;
  // int32 [n]: blocks only
  const void* row_block;
  // [n] or null
  const void* bias;
  // [m, n] or null
  const void* residual;
  int32_t m, n, k;
  // 1 fp16, 2 bf16
  int32_t y_type;
  // of w_scale: 0 float32, 1 fp16, 2 bf16
  int32_t w_type;
  // blocks: floats from one k block of x_scale to the next, a multiple of 4
  int32_t x_pitch;
  int32_t pdl;
  // the instance
  int32_t rows, columns, plain;
  // ctas: those of a multiprocessor
  int32_t slots, split, ctas;
  // grid: CTAs at most where tiles are not cut
  int32_t band, grid;
};

// The arguments of gm_quantize_rows_sm90.
struct GmQuantizeRowsArgs {
  static constexpr uint64_t kDigest = 0x437b007fcd5d91f9;
  int32_t device;
  int32_t m, k;
  // fp8_g128: floats from one group of scales to the next
  int32_t pitch;
  // 0 fp8_token (scales [m]), 1 fp8_g128 (scales [groups, pitch]), 2 int8_token (scales and sums of codes
  // [m])
  int32_t format;
  // 1 fp16, 2 bf16
  int32_t x_type;
  // a CUstream of the device
  void* stream;
  // [m, k]
  void* codes;
  float* scales;
  // int8_token only
  int32_t* sums;
  // [m, k], rows ldx elements apart, 16-byte aligned
  const void* x;
  int64_t ldx;
};
