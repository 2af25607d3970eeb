// What block-scaled codes for sm_120 need on a CPU beside attention_fibers.h: the instruction that multiplies them is a model of it, or, compiled
// with GM_BLOCK_SCALE_BY_BF16, what replaces it on other GPUs.
#pragma once
#include "attention_fibers.h"
#include "numbers_fibers.h"

// Of the functions for Hopper, what the sources use is here or in attention_fibers.h: without __CUDACC__ the header is empty, and stays it.
#undef __CUDACC__
#include "../../kernels/_native/sm90/ptx.cuh"
#define __CUDACC__
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__

namespace gm {

template <int BYTES>
void cp_async_small(uint32_t to, const void* from, bool valid) {
  fibers::copies[fibers::current].back().push_back({to, from, valid ? BYTES : 0u, BYTES});
}
template <int WORDS>
void ld_shared(uint32_t (&v)[WORDS], uint32_t from) {
  for (int i = 0; i < WORDS; ++i) v[i] = word_at(from + i * 4);
}

// e4m3, by its definition: sign, four bits of exponent with bias 7, three of mantissa, no infinities.
inline float e4m3_value(int byte) {
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  if ((byte & 0x7f) == 0x7f) return NAN;
  const float size =
      exponent ? std::ldexp(1.f + mantissa / 8.f, exponent - 7) : std::ldexp(mantissa / 8.f, -6);
  return byte & 0x80 ? -size : size;
}
// The nearest code, ties to even, saturating.
inline int e4m3_code(float v) {
  const int sign = std::signbit(v) ? 0x80 : 0;
  if (v != v) return 0x7f;
  int best = 0;
  for (int code = 1; code < 0x7f; ++code) {
    const double near = std::fabs(std::fabs(double(v)) - e4m3_value(code)),
                 best_near = std::fabs(std::fabs(double(v)) - e4m3_value(best));
    if (near < best_near || (near == best_near && code % 2 == 0)) best = code;
  }
  return sign | best;
}
inline uint16_t packed_e4m3(float low, float high) { return uint16_t(e4m3_code(low) | e4m3_code(high) << 8); }
inline uint2 e4m3_to_f16(uint32_t codes) {
  const auto pair = [&](int at) {
    return packed<__half>(e4m3_value(codes >> at & 255), e4m3_value(codes >> (at + 8) & 255));
  };
  return {pair(0), pair(16)};
}

}  // namespace gm

#ifdef GM_BLOCK_SCALE_BY_BF16
#include "sm120/mma_block_scale_by_bf16.cuh"
#else
#include "sm120/mma_block_scale.cuh"
namespace gm {

template <typename Format>
double value_of(uint32_t code) {
  static const double e2m1[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return Format::kBits == 8 ? e4m3_value(int(code)) : code & 8 ? -e2m1[code & 7] : e2m1[code & 7];
}
template <typename Format>
double scale_of(uint32_t byte) {
  return Format::kGroup == 16 ? e4m3_value(int(byte)) : byte == 255 ? NAN : std::ldexp(1., int(byte) - 127);
}

// Planted faults: 5 takes b's halves for each other, 6 the scales of another tile of A, 7 those of another tile of B.
template <typename Format, int BYTE, int OF_A, int OF_B>
void mma_block_scale(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, uint32_t a_scales,
                     uint32_t b_scales) {
  constexpr int kBits = Format::kBits, kCodes = 32 / kBits;
  const int base = fibers::current / 32 * 32, lane = fibers::current % 32, g = lane / 4, t = lane % 4;
  const int fault = fibers::fault, of_a = OF_A ^ (fault == 6), of_b = OF_B ^ (fault == 7);
  auto& own = fibers::registers[fibers::current];
  for (int i = 0; i < 4; ++i) own[i] = a[i];
  own[4] = b0, own[5] = b1, own[6] = a_scales, own[7] = b_scales;
  warp_sync();
  for (int i = 0; i < 4; ++i) {
    const int row = g + i / 2 * 8, column = 2 * t + i % 2;
    const uint32_t row_scales = fibers::registers[base + row % 8 * 4 + row / 8 + 2 * of_a][6],
                   column_scales = fibers::registers[base + column * 4 + of_b][7];
    double sum = 0;
    for (int k = 0; k < Format::kUnit; ++k) {
      const int quad = k / kCodes % 4, half = k / kCodes / 4, shift = k % kCodes * kBits;
      const uint32_t left = fibers::registers[base + row % 8 * 4 + quad][row / 8 + half * 2],
                     right = fibers::registers[base + column * 4 + quad][4 + (half ^ (fault == 5))];
      const int byte = (BYTE + k / Format::kGroup) * 8;
      const uint32_t mask = (1 << kBits) - 1;
      sum += value_of<Format>(left >> shift & mask) * scale_of<Format>(row_scales >> byte & 255) *
             value_of<Format>(right >> shift & mask) * scale_of<Format>(column_scales >> byte & 255);
    }
    d[i] = float(d[i] + sum);
  }
  warp_sync();
}

}  // namespace gm
#endif

#include "../../kernels/linear/block_scaled_sm120/_quantize_blocks_sm120f.cu"

// The shapes of the library; with other instructions one of each format is enough.
#ifdef GM_BLOCK_SCALE_BY_BF16
#define SHAPES(RUN) RUN(0, Nvfp4, 16, 4, 4) RUN(1, Mxfp4, 16, 4, 4) RUN(2, Mxfp8, 16, 4, 4)
#else
#define FP4_SHAPES(RUN, number, Format) \
  RUN(number, Format, 16, 4, 4)         \
  RUN(number, Format, 32, 4, 4) RUN(number, Format, 64, 4, 3) RUN(number, Format, 128, 8, 3)
#define SHAPES(RUN)         \
  FP4_SHAPES(RUN, 0, Nvfp4) \
  FP4_SHAPES(RUN, 1, Mxfp4) \
  RUN(2, Mxfp8, 16, 4, 4) RUN(2, Mxfp8, 32, 4, 3) RUN(2, Mxfp8, 64, 8, 2) RUN(2, Mxfp8, 128, 4, 2)
#endif
