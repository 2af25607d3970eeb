// Products of experts of block-scaled codes for sm_120, and the quantizer with a factor for each row, on a CPU, for
// test_moe_block_scaled_fibers.py.
#include "block_scaled_fibers.h"

#include "../../kernels/moe/moe/block_scaled_sm120/grouped.cuh"

namespace {

template <typename Format, int MT, int WN, int SLOTS>
void grouped(void* parameters) {
  gm::block_scaled::Grouped<Format, MT, WN, SLOTS>(*static_cast<gm::block_scaled::ExpertParams*>(parameters),
                                                   static_cast<uint8_t*>(gm::shared()))
      .run();
}
template <typename Format, bool HALF>
void quantize(void* parameters) {
  gm::quantize::quantize_blocks<Format, HALF>(*static_cast<QuantizeBlocksParams*>(parameters));
}
template <bool HALF>
void quantize_rows(void* parameters) {
  gm::quantize::quantize_rows<HALF>(*static_cast<QuantizeBlocksParams*>(parameters));
}
}  // namespace

// 0; 1 if threads wait for each other in vain; 2 for a shape that is not here. y [rows, n or n / 2], x [x_rows, k] and w [experts, n, k] packed.
extern "C" int grouped_block_scaled_on_cpu(int format, const uint8_t* w, const uint8_t* x, void* y,
                                           const uint8_t* x_scale, const uint8_t* w_scale,
                                           const float* x_factor, const float* w_factor, const void* bias,
                                           const int* offsets, const int* permutation, int experts, int n,
                                           int k, int top_k, int gated, int clamp, float alpha, float limit,
                                           int half, int mt, int warps, int grid, int order, int fault) {
  gm::fibers::order = order, gm::fibers::fault = fault;
  gm::block_scaled::ExpertParams p{};
  p.y = y, p.bias = bias, p.x = x, p.w = w, p.x_scale = x_scale, p.w_scale = w_scale;
  p.x_factor = x_factor, p.w_factor = w_factor, p.offsets = offsets, p.permutation = permutation;
  p.experts = experts, p.n = n, p.slots = k / 128, p.out_n = gated ? n / 2 : n, p.top_k = top_k;
  p.gated = gated, p.clamp = clamp, p.alpha = alpha, p.limit = limit, p.half = half;
#define RUN(number, Format, MT, WN, SLOTS)                                                        \
  if (format == number && mt == MT && warps == WN) {                                              \
    p.blocks = (n + WN * 32 - 1) / (WN * 32);                                                     \
    return !gm::launch_grid(grouped<gm::Format, MT, WN, SLOTS>, &p, grid, WN * 32,                \
                            gm::block_scaled::Grouped<gm::Format, MT, WN, SLOTS>::kSlot * SLOTS + \
                                gm::block_scaled::behind_ring(experts, MT));                      \
  }
  SHAPES(RUN)
#undef RUN
  return 2;
}

// Codes, scales and factors of the rows of x [m, k] in NVFP4, rows ldx apart.
extern "C" int quantize_rows_on_cpu(const uint16_t* x, uint8_t* codes, uint8_t* scales, float* factors,
                                    int64_t ldx, int m, int k, int half, int order, int fault) {
  gm::fibers::order = order, gm::fibers::fault = fault;
  QuantizeBlocksParams p{x, codes, scales, factors, nullptr, ldx, int64_t(m) * (k / 8), k / 8, 0};
  return !gm::launch_grid(half ? quantize_rows<true> : quantize_rows<false>, &p, m, 256, 0);
}

// Codes and scales of x [m, k] in MXFP4 (format 1) or MXFP8, rows ldx apart.
extern "C" int quantize_blocks_on_cpu(int format, const uint16_t* x, uint8_t* codes, uint8_t* scales,
                                      int64_t ldx, int m, int k, int half, int order, int fault) {
  gm::fibers::order = order, gm::fibers::fault = fault;
  QuantizeBlocksParams p{x, codes, scales, nullptr, nullptr, ldx, int64_t(m) * (k / 8), k / 8, 0};
  const int ctas = int((p.vectors + 255) / 256);
  void (*const kernels[2][2])(void*) = {{quantize<gm::Mxfp4, false>, quantize<gm::Mxfp4, true>},
                                        {quantize<gm::Mxfp8, false>, quantize<gm::Mxfp8, true>}};
  return !gm::launch_grid(kernels[format - 1][half], &p, ctas, 256, 0);
}
