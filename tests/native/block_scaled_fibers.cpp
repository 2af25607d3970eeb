// Products of block-scaled codes for sm_120, and the quantizer of x, on a CPU, for test_block_scaled_fibers.py.
//
// The one instruction is a model of it, or, compiled with GM_BLOCK_SCALE_BY_BF16, what replaces it on other GPUs.
#include "attention_fibers.h"
#include "numbers_fibers.h"

// Of the functions for Hopper, what the sources use is here or in attention_fibers.h: without __CUDACC__ the header is empty, and stays it.
#undef __CUDACC__
#include "../../kernels/_native/sm90/ptx.cuh"
#define __CUDACC__
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__

inline uint32_t __shfl_sync(uint32_t all, uint32_t value, int from) {
  return uint32_t(__shfl_sync(all, int(value), from));
}

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
#include "../../kernels/linear/block_scaled_sm120/product.cuh"

namespace {

template <typename Format, int MT, int WN, int SLOTS>
void product(void* parameters) {
  gm::block_scaled::Product<Format, MT, WN, SLOTS>(*static_cast<gm::block_scaled::Params*>(parameters),
                                                   static_cast<uint8_t*>(gm::shared()))
      .run();
}
template <typename Format, bool HALF>
void quantize(void* parameters) {
  gm::quantize::quantize_blocks<Format, HALF>(*static_cast<QuantizeBlocksParams*>(parameters));
}
template <bool HALF>
void maximum(void* parameters) {
  gm::quantize::write_maximum<HALF>(*static_cast<QuantizeBlocksParams*>(parameters));
}

// Registers of the lanes of a warp: a [32][4], b [32][2], scales of a and b [32], sums [32][4].
struct Warp {
  const uint32_t *a, *b, *a_scales, *b_scales;
  float* d;
};
template <typename Format, int BYTE, int OF_A, int OF_B>
void one(void* parameters) {
  const Warp& w = *static_cast<Warp*>(parameters);
  const int lane = gm::thread();
  uint32_t a[4];
  float d[4];
  for (int i = 0; i < 4; ++i) a[i] = w.a[lane * 4 + i], d[i] = w.d[lane * 4 + i];
  gm::mma_block_scale<Format, BYTE, OF_A, OF_B>(d, a, w.b[lane * 2], w.b[lane * 2 + 1], w.a_scales[lane],
                                                w.b_scales[lane]);
  for (int i = 0; i < 4; ++i) w.d[lane * 4 + i] = d[i];
}

}  // namespace

// One instruction; 2 for selectors that are not here. format: 0 nvfp4, 1 mxfp4, 2 mxfp8.
extern "C" int block_scale_on_cpu(int format, int byte, int of_a, int of_b, const uint32_t* a,
                                  const uint32_t* b, const uint32_t* a_scales, const uint32_t* b_scales,
                                  float* d) {
  gm::fibers::order = gm::fibers::fault = 0;
  Warp warp{a, b, a_scales, b_scales, d};
#define ONE(number, Format, BYTE, OF_A, OF_B)                           \
  if (format == number && byte == BYTE && of_a == OF_A && of_b == OF_B) \
    return !gm::launch_grid(one<gm::Format, BYTE, OF_A, OF_B>, &warp, 1, 32, 0);
#define BS(number, Format, BYTE, OF_A) \
  ONE(number, Format, BYTE, OF_A, 0)   \
  ONE(number, Format, BYTE, OF_A, 1) ONE(number, Format, BYTE, OF_A, 2) ONE(number, Format, BYTE, OF_A, 3)
#define AS(number, Format, BYTE) BS(number, Format, BYTE, 0) BS(number, Format, BYTE, 1)
  AS(0, Nvfp4, 0)
  AS(1, Mxfp4, 0)
  AS(1, Mxfp4, 2)
  AS(2, Mxfp8, 0)
  AS(2, Mxfp8, 1)
  AS(2, Mxfp8, 2)
  AS(2, Mxfp8, 3)
  return 2;
}

// 0; 1 if threads wait for each other in vain; 2 for a shape that is not here. y [m, n], x [m, k] and w [n, k] packed.
extern "C" int block_scaled_on_cpu(int format, const void* w, const void* x, void* y, const uint8_t* x_scale,
                                   const uint8_t* w_scale, const float* x_factor, const float* w_factor,
                                   const void* bias, const void* residual, uint32_t* counters, void* sums,
                                   int m, int n, int k, int half, int mt, int warps, int grid, int share,
                                   int order, int fault) {
  gm::fibers::order = order, gm::fibers::fault = fault;
  gm::block_scaled::Params p{};
  p.w = static_cast<const uint8_t*>(w), p.x = static_cast<const uint8_t*>(x), p.y = y;
  p.x_scale = x_scale, p.w_scale = w_scale, p.x_factor = x_factor, p.w_factor = w_factor;
  p.bias = bias, p.residual = residual, p.counters = counters, p.sums = sums;
  p.m = m, p.n = n, p.k = k, p.half = half, p.high = (m + mt - 1) / mt, p.vectors = n % 8 == 0;
  p.groups = k / 128;
#define RUN(number, Format, MT, WN, SLOTS)                                                        \
  if (format == number && mt == MT && warps == WN) {                                              \
    p.blocks = p.whole = p.high * ((n + WN * 32 - 1) / (WN * 32));                                \
    const int rest = p.blocks % grid;                                                             \
    if (share && rest * p.groups >= grid) p.whole -= rest;                                        \
    return !gm::launch_grid(product<gm::Format, MT, WN, SLOTS>, &p, grid, WN * 32,                \
                            gm::block_scaled::Product<gm::Format, MT, WN, SLOTS>::kSlot * SLOTS); \
  }
  RUN(0, Nvfp4, 16, 4, 4)
  RUN(1, Mxfp4, 16, 4, 4)
  RUN(2, Mxfp8, 16, 4, 4)
#ifndef GM_BLOCK_SCALE_BY_BF16  // of which one shape is enough
#define LARGER(number, Format) \
  RUN(number, Format, 32, 4, 4) RUN(number, Format, 64, 4, 3) RUN(number, Format, 128, 8, 3)
  LARGER(0, Nvfp4)
  LARGER(1, Mxfp4)
  RUN(2, Mxfp8, 32, 4, 3)
  RUN(2, Mxfp8, 64, 8, 2)
  RUN(2, Mxfp8, 128, 4, 2)
#endif
  return 2;
}

// Codes and scales of x [m, k], rows ldx apart; of nvfp4 also the factor, by way of `maxima` of `parts`.
extern "C" int quantize_on_cpu(int format, const uint16_t* x, uint8_t* codes, uint8_t* scales, float* factor,
                               float* maxima, int64_t ldx, int m, int k, int half, int parts, int order,
                               int fault) {
  gm::fibers::order = order, gm::fibers::fault = fault;
  const int64_t vectors = int64_t(m) * (k / 8);
  QuantizeBlocksParams p{x, codes, scales, factor, maxima, ldx, vectors, k / 8, parts};
  const int ctas = int((vectors + 255) / 256);
  if (format == 0 && !gm::launch_grid(half ? maximum<true> : maximum<false>, &p, parts, 256, 0)) return 1;
  void (*const kernels[3][2])(void*) = {{quantize<gm::Nvfp4, false>, quantize<gm::Nvfp4, true>},
                                        {quantize<gm::Mxfp4, false>, quantize<gm::Mxfp4, true>},
                                        {quantize<gm::Mxfp8, false>, quantize<gm::Mxfp8, true>}};
  return !gm::launch_grid(kernels[format][half], &p, ctas, 256, 0);
}
