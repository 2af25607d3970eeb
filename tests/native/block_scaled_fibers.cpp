// Products of block-scaled codes for sm_120, and the quantizer of x, on a CPU, for test_block_scaled_fibers.py.
#include "block_scaled_fibers.h"

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
  SHAPES(RUN)
#undef RUN
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
