// Written by `make generate` from args.py, which declares these structs; do not edit.
#pragma once
#include <cstdint>

// The arguments of every gm_grouped_w8a8_<format>_sm90.
struct GmGroupedW8a8Args {
  static constexpr uint64_t kDigest = 0x59c44724241d39b1;
  // ordinal; -1: nothing is launched, the bytes of shared memory are returned
  int32_t device;
  // CUstream
  void* stream;
  // [rows, n] contiguous
  void* y;
  // [rows, k] 8-bit values, contiguous, sorted by expert
  const void* x;
  // [experts, n, k] contiguous
  const void* w;
  // float32 [rows]; blocks: [k blocks, x_pitch], see scale_column in experts.h
  const void* x_scale;
  // [experts, n]; blocks: [experts, block rows, k blocks]
  const void* w_scale;
  // int32 [n]: blocks only
  const void* row_block;
  // [experts + 1]: expert e has the rows offsets[e] .. offsets[e + 1]
  const int32_t* offsets;
  int32_t rows, experts, n, k;
  // 1 fp16, 2 bf16
  int32_t y_type;
  // of w_scale: 0 float32, 1 fp16, 2 bf16
  int32_t w_type;
  // blocks: of an expert
  int32_t block_rows;
  // blocks: floats from one k block of x_scale to the next, a multiple of 4
  int32_t x_pitch;
  int32_t pdl;
  // the instance: rows of operands A and B of a tile, whether A is x
  int32_t tile_a, tile_b, plain;
  // ctas: those of a multiprocessor
  int32_t slots, ctas;
  // CTAs at most
  int32_t grid;
};

// The arguments of gm_moe_quantize_sm90: rows of x, or of its gated activation, in the order of experts.
struct GmMoeQuantizeArgs {
  static constexpr uint64_t kDigest = 0x58a14b658dec10b7;
  int32_t device;
  int32_t tokens, top_k, k, experts;
  // x is gate and up [tokens * top_k, 2 k] in the order of experts
  int32_t gated;
  // scales of 128 columns, [groups, pitch], and not of rows
  int32_t groups;
  // of x: 1 fp16, 2 bf16
  int32_t type;
  // a CUstream of the device
  void* stream;
  // [tokens * top_k, k]
  void* codes;
  float* scales;
  // [tokens, k], rows ldx elements apart
  const void* x;
  int64_t ldx;
  // [tokens, top_k]
  const int32_t* ids;
  // [tokens * top_k]
  const int32_t* inverse;
  // [experts + 1]
  const int32_t* offsets;
};

// The arguments of gm_moe_place_codes_sm90: given codes of tokens, copied in the order of experts.
struct GmMoePlaceCodesArgs {
  static constexpr uint64_t kDigest = 0x2333bc4a1ec41967;
  int32_t device;
  int32_t tokens, top_k, k, experts;
  // scales of a token, for 128 columns each; 0: one
  int32_t groups;
  // a CUstream of the device
  void* stream;
  // [tokens * top_k, k]
  void* codes;
  // [tokens * top_k], or [groups, pitch]
  float* scales;
  // [tokens, k] 8-bit values, rows given_stride apart
  const void* given;
  // of token t and group g: at t * row_stride + g * group_stride
  const float* given_scales;
  int64_t given_stride, row_stride, group_stride;
  // [tokens, top_k]
  const int32_t* ids;
  // [tokens * top_k]
  const int32_t* inverse;
  // [experts + 1]
  const int32_t* offsets;
};
