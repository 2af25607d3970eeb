// Arguments of the entries of w8a8, as _launch.py fills them.
#pragma once
#include <cstdint>

struct gm_linear_w8a8_args {
  int32_t size;    // of this struct, to refuse another version
  int32_t device;  // ordinal; -1: nothing is launched, the bytes of shared memory are returned
  void* stream;    // CUstream
  void* y;         // [m, n] contiguous
  const void* x;   // [m, k] 8-bit values, rows ldx apart
  int64_t ldx;
  const void* w;          // [n, k] contiguous
  const void* x_scale;    // float32 [m], or [k blocks, x_pitch]
  const void* x_sum;      // int32 [m]: int8 only
  const void* w_scale;    // [n], or [block rows, k blocks]
  const void* row_block;  // int32 [n]: blocks only
  const void* bias;       // [n] or null
  const void* residual;   // [m, n] or null
  int32_t m, n, k;
  int32_t y_type;   // 1 fp16, 2 bf16
  int32_t w_type;   // of w_scale: 0 float32, 1 fp16, 2 bf16
  int32_t x_pitch;  // blocks: floats from one k block of x_scale to the next, a multiple of 4
  int32_t pdl;
  int32_t rows, columns, plain;  // the instance
  int32_t slots, split, ctas;    // ctas: those of a multiprocessor
  int32_t band, grid;            // grid: CTAs at most where tiles are not cut
};
