// Products of 8-bit weights and activations for sm_80 and sm_89, and the quantizers of x, on a CPU, for test_w8a8_fibers.py.
#include "attention_fibers.h"
#include "numbers_fibers.h"

// Of the functions for Hopper, what the sources use is here or in attention_fibers.h: without __CUDACC__ the header is empty, and stays it.
#undef __CUDACC__
#include "../../kernels/_native/sm90/ptx.cuh"
#define __CUDACC__
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__

struct int4 {
  int x, y, z, w;
};
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

namespace gm {

// Element `byte` of a register of four bytes: signed, or in e4m3.
inline int signed_byte(uint32_t word, int byte) { return int8_t(word >> byte * 8); }
inline double e4m3(uint32_t word, int byte) {
  const int bits = word >> byte * 8 & 255, exponent = bits >> 3 & 15, fraction = bits & 7;
  if ((bits & 127) == 127) return NAN;
  const double size = exponent ? std::ldexp(8 + fraction, exponent - 10) : std::ldexp(double(fraction), -9);
  return bits & 128 ? -size : size;
}
// d += a b for 16 x 32 by 32 x 8, in the layout of mma.m16n8k32, rounded once from EXACT, which holds such a sum. A planted
// fault, 5, takes b's halves for each other.
template <typename Exact, typename T, typename Element>
void mma_of_bytes(T (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const Element& element) {
  const int base = fibers::current / 32 * 32, lane = fibers::current % 32, g = lane / 4, t = lane % 4;
  auto& own = fibers::registers[fibers::current];
  for (int i = 0; i < 4; ++i) own[i] = a[i];
  own[4] = b0, own[5] = b1;
  warp_sync();
  for (int i = 0; i < 4; ++i) {
    const int row = g + i / 2 * 8, column = 2 * t + i % 2;
    Exact sum = d[i];
    for (int k = 0; k < 32; ++k) {
      const int quad = k % 16 / 4, half = k / 16;
      const uint32_t left = fibers::registers[base + row % 8 * 4 + quad][row / 8 + half * 2];
      const uint32_t right = fibers::registers[base + column * 4 + quad][4 + (half ^ (fibers::fault == 5))];
      sum += element(left, k % 4) * element(right, k % 4);
    }
    d[i] = T(sum);
  }
  warp_sync();
}
inline void mma_s8(int32_t (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma_of_bytes<int32_t>(d, a, b0, b1, signed_byte);
}
inline void mma_e4m3(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma_of_bytes<double>(d, a, b0, b1, e4m3);
}
// d += a b for 8 x 16 by 16 x 8, in the layout of mma.m8n8k16. A planted fault, 5, takes b's columns for each other.
inline void mma_m8n8k16(int32_t& d0, int32_t& d1, uint32_t a, uint32_t b) {
  const int base = fibers::current / 32 * 32, lane = fibers::current % 32;
  auto& own = fibers::registers[fibers::current];
  own[0] = a, own[1] = b;
  warp_sync();
  int32_t* d[2] = {&d0, &d1};
  for (int i = 0; i < 2; ++i)
    for (int k = 0; k < 16; ++k) {
      const int column = 2 * (lane % 4) + (i ^ (fibers::fault == 5));
      *d[i] += signed_byte(fibers::registers[base + lane / 4 * 4 + k / 4][0], k % 4) *
               signed_byte(fibers::registers[base + column * 4 + k / 4][1], k % 4);
    }
  warp_sync();
}
// To nearest, ties to even, at most 448.
inline uint32_t to_e4m3(float v) {
  if (v != v) return 127;
  const double size = std::min(std::fabs(double(v)), 448.);
  const int exponent = std::max(size > 0 ? std::ilogb(size) : -6, -6);
  const int steps = int(std::nearbyint(std::ldexp(size, 3 - exponent)));  // 16 is the next exponent's 8
  const int code = std::min(steps < 8 ? steps : (exponent + 7) * 8 + steps - 8, 126);
  return code | (std::signbit(v) ? 128 : 0);
}
inline uint16_t packed_e4m3(float low, float high) { return to_e4m3(low) | to_e4m3(high) << 8; }

}  // namespace gm

#include "../../kernels/linear/w8a8_sm80/_quantize_fp8_sm89.cu"
#include "../../kernels/linear/w8a8_sm80/_quantize_int8_sm80.cu"
#include "../../kernels/linear/w8a8_sm80/fp8.cuh"
#include "../../kernels/linear/w8a8_sm80/int8.cuh"
#include "../../kernels/linear/w8a8_sm80/int8_sm75.cuh"

using gm::w8a8::E4m3, gm::w8a8::Int8, gm::w8a8::Int8OfTuring;

// A kind, its operands, and a shape of shapes.py.
#define INSTANCES(F)                \
  F(0, Int8, 16, 4, 128, 4)         \
  F(0, Int8, 32, 4, 128, 4)         \
  F(0, Int8, 64, 8, 64, 4)          \
  F(0, Int8, 128, 4, 64, 4)         \
  F(0, Int8, 128, 8, 64, 4)         \
  F(1, E4m3<false>, 16, 4, 128, 4)  \
  F(1, E4m3<false>, 32, 4, 128, 4)  \
  F(1, E4m3<false>, 64, 4, 64, 4)   \
  F(1, E4m3<false>, 64, 8, 64, 4)   \
  F(2, E4m3<true>, 16, 4, 128, 4)   \
  F(2, E4m3<true>, 32, 4, 128, 4)   \
  F(2, E4m3<true>, 64, 4, 64, 3)    \
  F(2, E4m3<true>, 64, 8, 64, 4)    \
  F(3, Int8OfTuring, 16, 4, 128, 2) \
  F(3, Int8OfTuring, 32, 4, 64, 2)  \
  F(3, Int8OfTuring, 64, 4, 64, 2)  \
  F(3, Int8OfTuring, 64, 8, 64, 2)

namespace {

template <typename OPERANDS, int MT, int WN, int KB, int SLOTS>
void product(void* parameters) {
  gm::w8a8::Product<OPERANDS, MT, WN, KB, SLOTS>(*static_cast<gm::w8a8::Params*>(parameters),
                                                 static_cast<uint8_t*>(gm::shared()))
      .run();
}
template <bool HALF>
void quantize(void* parameters) {
  quantize_row_to_int8<HALF>(*static_cast<QuantizeInt8Params*>(parameters));
}
template <bool HALF, int FORMAT>
void quantize_fp8(void* parameters) {
  const auto& p = *static_cast<QuantizeFp8Params*>(parameters);
  if constexpr (FORMAT == 0)
    quantize_row_to_e4m3<HALF>(p);
  else if constexpr (FORMAT == 1)
    quantize_groups_to_e4m3<HALF>(p);
  else if constexpr (FORMAT == 2)
    quantize_by_maxima<HALF>(p);
  else
    find_maximum<HALF>(p);
}

}  // namespace

// 0; 1 if threads wait for each other in vain; 2 for a shape that is none of the above. y [m, n], x [m, ldx], w [n, k]; kind:
// 0 int8, 1 e4m3, 2 e4m3 with scales of blocks, 3 int8 for sm_75.
extern "C" int w8a8_on_cpu(const void* w, const void* x, void* y, const float* x_scale, const void* w_scale,
                           const void* bias, const void* residual, uint32_t* counters, void* sums,
                           const int* row_block, int64_t ldx, int m, int n, int k, int half, int w_type,
                           int mt, int warps, int grid, int share, int kind, int x_step, int x_pitch,
                           int order, int fault) {
  gm::fibers::order = order, gm::fibers::fault = fault;
  gm::w8a8::Params p{};
  p.w = static_cast<const uint8_t*>(w), p.x = static_cast<const uint8_t*>(x), p.y = y;
  p.x_scale = x_scale, p.w_scale = w_scale, p.bias = bias, p.residual = residual, p.counters = counters;
  p.row_block = row_block, p.x_step = x_step, p.x_pitch = x_pitch, p.k_blocks = (k + 127) / 128;
  p.sums = sums, p.ldx = ldx, p.m = m, p.n = n, p.k = k, p.half = half, p.w_type = w_type;
  p.high = (m + mt - 1) / mt, p.vectors = n % 8 == 0;
#define RUN(KIND, OPERANDS, MT, WN, KB, SLOTS)                                                            \
  if (kind == KIND && mt == MT && warps == WN) {                                                          \
    using One = gm::w8a8::Product<OPERANDS, MT, WN, KB, SLOTS>;                                           \
    p.groups = (k + KB - 1) / KB;                                                                         \
    p.blocks = p.whole = p.high * ((n + WN * 32 - 1) / (WN * 32));                                        \
    const int rest = p.blocks % grid;                                                                     \
    if (share && rest * p.groups >= grid) p.whole -= rest;                                                \
    return !gm::launch_grid(product<OPERANDS, MT, WN, KB, SLOTS>, &p, grid, WN * 32, SLOTS * One::kSlot); \
  }
  INSTANCES(RUN)
#undef RUN
  return 2;
}

// codes [m, k] and scales [m] of x [m, k], rows ldx apart.
extern "C" int quantize_on_cpu(const uint16_t* x, uint8_t* codes, float* scales, int64_t ldx, int m, int k,
                               int half, int order, int fault) {
  gm::fibers::order = order, gm::fibers::fault = fault;
  QuantizeInt8Params p{x, codes, scales, ldx, k};
  return !gm::launch_grid(half ? quantize<true> : quantize<false>, &p, m, 256, 0);
}

// In a format of GmQuantizeFp8Sm89Args. maxima: [parts].
extern "C" int quantize_fp8_on_cpu(const uint16_t* x, uint8_t* codes, float* scales, float* maxima,
                                   int64_t ldx, int m, int k, int pitch, int parts, int format, int half,
                                   int order) {
  gm::fibers::order = order, gm::fibers::fault = 0;
  QuantizeFp8Params p{x, codes, scales, maxima, ldx, m, k, pitch, parts};
  constexpr void (*kKernels[4][2])(void*) = {{quantize_fp8<false, 0>, quantize_fp8<true, 0>},
                                             {quantize_fp8<false, 1>, quantize_fp8<true, 1>},
                                             {quantize_fp8<false, 2>, quantize_fp8<true, 2>},
                                             {quantize_fp8<false, 3>, quantize_fp8<true, 3>}};
  if (format == 2 && !gm::launch_grid(kKernels[3][half], &p, parts, 256, 0)) return 1;
  const int grid = format == 1 ? (m * ((k + 127) / 128) * 16 + 255) / 256 : m;
  return !gm::launch_grid(kKernels[format][half], &p, grid, 256, 0);
}
