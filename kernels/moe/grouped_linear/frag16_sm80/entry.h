// The kernels of grouped linear for one weight format, and their entry point.
//
// A source _grouped_linear_<format>_sm80.cu defines
//   GM_ENTRY         the exported function, gm_grouped_linear_<format>_sm80
//   GM_OPERANDS(K)   K(type of x, type of 16-bit scales or any, class of operands.cuh) ...
//   GM_TILE_BYTES    of a tile
// and includes this file: nvcc reads the kernels, the host compiler the entry.
#pragma once
#include "gm_cuda.h"
#include "grouped.cuh"

// Rows of x, warps, slots of x and of weights, CTAs per multiprocessor; shapes.py has the same.
#if GM_TILE_BYTES <= 1280
#define GM_SHAPES(K, ...)        \
  K(16, 4, 5, 3, 3, __VA_ARGS__) \
  K(32, 4, 5, 3, 3, __VA_ARGS__) \
  K(64, 4, 5, 3, 2, __VA_ARGS__) \
  K(128, 8, 3, 2, 1, __VA_ARGS__)
#else
#define GM_SHAPES(K, ...)        \
  K(16, 4, 3, 2, 3, __VA_ARGS__) \
  K(32, 4, 3, 2, 2, __VA_ARGS__) \
  K(64, 4, 3, 2, 2, __VA_ARGS__) \
  K(80, 4, 3, 2, 1, __VA_ARGS__)
#endif

#ifdef __CUDACC__
#include "linear/frag16_sm80/operands.cuh"
#include "linear/frag16_sm80/operands_gguf.cuh"

#define GM_KERNEL(mt, warps, nx, nw, ctas, type, scales, ...)                                   \
  extern "C" __global__ void __launch_bounds__(warps * 32, ctas)                                \
      grouped_##type##_##scales##_##mt##x##warps(const __grid_constant__ gm::GroupedParams p) { \
    static_assert(__VA_ARGS__::kBytes == GM_TILE_BYTES);                                        \
    extern __shared__ __align__(128) uint8_t smem[];                                            \
    gm::Grouped<__VA_ARGS__, mt, warps, nx, nw>(p, smem).run();                                 \
  }
#define GM_KERNELS(...) GM_SHAPES(GM_KERNEL, __VA_ARGS__)
GM_OPERANDS(GM_KERNELS)

#else  // host
#include "args.h"
#include "moe/expert_grid.h"

namespace {

using Args = GmGroupedFrag16Sm80Args;

constexpr int kMaxExperts = 1024;

enum { kType_any, kType_fp16, kType_bf16 };
struct Instance {
  int mt, warps, nx, nw, x_type, scale_type;
  gm::CudaKernel kernel;
  bool is(const Args& a) const {
    return x_type == a.x_type && (scale_type == kType_any || scale_type == a.scale_type) && mt == a.mt &&
           warps == a.warps;
  }
};
#define GM_INSTANCE(mt, warps, nx, nw, ctas, type, scales, ...) \
  {mt,                                                          \
   warps,                                                       \
   nx,                                                          \
   nw,                                                          \
   kType_##type,                                                \
   kType_##scales,                                              \
   {GM_CUBIN, "grouped_" #type "_" #scales "_" #mt "x" #warps}},
#define GM_INSTANCES(...) GM_SHAPES(GM_INSTANCE, __VA_ARGS__)
Instance g_instances[] = {GM_OPERANDS(GM_INSTANCES)};

int run(const Args& a, Instance& one) {
  if (a.grid < 1 || a.top_k < 1 || a.offsets == nullptr) return GM_E_ARG;
  if (a.rows < 0 || a.x_rows < 0 || a.experts < 1 || a.experts > kMaxExperts || a.n < 1 || a.k < 1)
    return GM_E_SHAPE;
  // Rows of x are read in chunks of 16 bytes; the rows of up begin with a tile.
  if (a.k % 8 || a.ldx % 8 || a.ldx < a.k || !gm::is_aligned(a.x)) return GM_E_SHAPE;
  if (a.silu_mul ? a.n % (2 * gm::kTileRows) != 0 : a.clamp != 0) return GM_E_ARG;
  if (a.x_rows * (a.ldx / 8) > int64_t(UINT32_MAX)) return GM_E_SHAPE;
  gm::GroupedParams p{};
  p.w = static_cast<const uint8_t*>(a.w), p.x = a.x, p.y = a.y, p.bias = a.bias, p.row_scale = a.row_scale;
  p.offsets = a.offsets, p.permutation = a.permutation, p.x_chunks = uint32_t(a.ldx / 8);
  p.rows = a.rows, p.experts = a.experts, p.n = a.n, p.k = a.k, p.top_k = a.top_k;
  p.groups = gm::ceil_div(a.k, gm::kTileK), p.tiles = gm::ceil_div(a.n, gm::kTileRows);
  p.expert_bytes = int64_t(p.tiles) * p.groups * GM_TILE_BYTES;
  p.gated = a.silu_mul != 0, p.clamp = a.clamp != 0, p.alpha = a.alpha, p.limit = a.limit;
  p.out_n = p.gated ? a.n / 2 : a.n;
  p.blocks =
      p.gated ? gm::ceil_div(p.tiles / 2, one.warps) : gm::ceil_div(p.tiles, one.warps * gm::kWarpTiles);
  p.scales_half = a.scale_type == kType_fp16, p.vectors = p.out_n % 8 == 0 && gm::is_aligned(a.y);
  const int smem = one.nx * one.mt * gm::kXBytes + one.warps * one.nw * gm::kWarpTiles * GM_TILE_BYTES +
                   gm::list_bytes(a.experts);
  if (a.device < 0) return smem;
  if (a.rows == 0) return GM_OK;
  const int64_t tiles = gm::most_expert_tiles(a.rows, a.experts, one.mt, p.blocks);
  if (tiles > INT32_MAX) return GM_E_SHAPE;
  void* arguments[] = {&p};
  return one.kernel.launch(a.device, a.stream,
                           {.grid_x = unsigned(tiles < a.grid ? tiles : a.grid),
                            .block = unsigned(one.warps * 32),
                            .smem = unsigned(smem)},
                           arguments);
}

}  // namespace

// Returns GM_OK, or an error.
GM_CUDA_ARGS(GM_ENTRY, GmGroupedFrag16Sm80Args)(const GmGroupedFrag16Sm80Args* args) {
  if ((args->x_type != 1 && args->x_type != 2) || args->scale_type < 0 || args->scale_type > 2)
    return GM_E_DTYPE;
  for (Instance& one : g_instances)
    if (one.is(*args)) return run(*args, one);
  return GM_E_ARG;
}

#endif
