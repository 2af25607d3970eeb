// The schedules gemm and grouped on a CPU, for test_sm80_fibers.py and test_sm75_fibers.py. A source that includes this has included the
// schedules, and defines Weights, the class of the weights, and SHAPES(F): F(rows of x, warps, slots of x, slots of weights) ...
#pragma once

namespace {

template <int MT, int WN, int NX, int NW>
constexpr int kRings = NX * MT * gm::kXBytes + NW * WN * gm::kWarpTiles * Weights::kBytes;

template <int MT, int WN, int NX, int NW>
void gemm(void* parameters) {
  gm::Gemm<Weights, MT, WN, NX, NW>(*static_cast<gm::GemmParams*>(parameters),
                                    static_cast<uint8_t*>(gm::shared()))
      .run();
}
template <int MT, int WN, int NX, int NW>
void grouped(void* parameters) {
  gm::Grouped<Weights, MT, WN, NX, NW>(*static_cast<gm::GroupedParams*>(parameters),
                                       static_cast<uint8_t*>(gm::shared()))
      .run();
}

}  // namespace

// 0; 1 if threads wait for each other in vain; 2 for a shape that is none of the above. y [m, n], x [m, ldx], w tiles of [n, k].
extern "C" int gemm_on_cpu(const void* w, const void* x, void* y, const void* bias, const void* residual,
                           const float* row_scale, uint32_t* counters, float* sums, int64_t ldx, int m, int n,
                           int k, int mt, int grid, int share, int order, int fault) {
  gm::fibers::order = order, gm::fibers::fault = fault;
  gm::GemmParams p{};
  p.w = static_cast<const uint8_t*>(w), p.x = x, p.y = y, p.bias = bias, p.residual = residual;
  p.row_scale = row_scale, p.counters = counters, p.sums = sums, p.ldx = ldx, p.m = m, p.n = n, p.k = k;
  p.tiles = (n + 15) / 16, p.groups = (k + 127) / 128, p.high = (m + mt - 1) / mt, p.vectors = n % 8 == 0;
#define RUN(MT, WN, NX, NW)                                                                          \
  if (mt == MT) {                                                                                    \
    p.x_step = ldx * WN * 32 / 8 * 2, p.blocks = p.whole = p.high * ((n + WN * 32 - 1) / (WN * 32)); \
    const int rest = p.blocks % grid;                                                                \
    if (share && rest * p.groups >= grid) p.whole -= rest;                                           \
    return !gm::launch_grid(gemm<MT, WN, NX, NW>, &p, grid, WN * 32, kRings<MT, WN, NX, NW>);        \
  }
  SHAPES(RUN)
#undef RUN
  return 2;
}

// As gemm_on_cpu. y [rows, n or n / 2], x rows `ldx` apart, w tiles of [experts, n, k].
extern "C" int grouped_on_cpu(const void* w, const void* x, void* y, const void* bias, const float* row_scale,
                              const int* offsets, const int* permutation, int64_t ldx, int rows, int experts,
                              int n, int k, int top_k, int gated, int clamp, float alpha, float limit, int mt,
                              int grid, int order, int fault) {
  gm::fibers::order = order, gm::fibers::fault = fault;
  gm::GroupedParams p{};
  p.w = static_cast<const uint8_t*>(w), p.x = x, p.y = y, p.bias = bias, p.row_scale = row_scale;
  p.offsets = offsets, p.permutation = permutation, p.x_chunks = uint32_t(ldx / 8);
  p.rows = rows, p.experts = experts, p.n = n, p.k = k, p.top_k = top_k;
  p.groups = (k + 127) / 128, p.tiles = (n + 15) / 16;
  p.expert_bytes = int64_t(p.tiles) * p.groups * Weights::kBytes;
  p.gated = gated, p.clamp = clamp, p.alpha = alpha, p.limit = limit, p.out_n = gated ? n / 2 : n;
  p.vectors = p.out_n % 8 == 0;
#define RUN(MT, WN, NX, NW)                                                    \
  if (mt == MT) {                                                              \
    const int each = gated ? WN : 2 * WN, all = gated ? p.tiles / 2 : p.tiles; \
    p.blocks = (all + each - 1) / each;                                        \
    return !gm::launch_grid(grouped<MT, WN, NX, NW>, &p, grid, WN * 32,        \
                            kRings<MT, WN, NX, NW> + gm::list_bytes(experts)); \
  }
  SHAPES(RUN)
#undef RUN
  return 2;
}
