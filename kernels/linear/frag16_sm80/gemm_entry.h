// The kernels of one weight format under the schedule gemm, and their entry point.
//
// A source _linear_<format>_gemm_sm80.cu defines
//   GM_ENTRY         the exported function, gm_linear_<format>_gemm_sm80
//   GM_OPERANDS(K)   K(type of x, type of 16-bit scales or any, class of operands.cuh) ...
//   GM_TILE_BYTES    of a tile
// and includes this file: nvcc reads the kernels, the host compiler the entry.
#pragma once
#include "gemm.cuh"
#include "gm_cuda.h"

// Rows of x, warps, slots of x and of weights, CTAs per multiprocessor; gemm.py has the same.
#if GM_TILE_BYTES <= 1280
#define GM_SHAPES(K, ...)        \
  K(32, 8, 5, 3, 2, __VA_ARGS__) \
  K(64, 4, 5, 3, 2, __VA_ARGS__) \
  K(64, 8, 4, 3, 1, __VA_ARGS__) \
  K(128, 8, 3, 2, 1, __VA_ARGS__)
#else
#define GM_SMALL(K, ...)         \
  K(32, 8, 3, 2, 2, __VA_ARGS__) \
  K(64, 4, 3, 2, 2, __VA_ARGS__) \
  K(64, 8, 3, 2, 1, __VA_ARGS__)
#if GM_TILE_BYTES <= 2112
#define GM_SHAPES(K, ...) GM_SMALL(K, __VA_ARGS__) K(128, 8, 2, 2, 1, __VA_ARGS__)
#else  // beside larger tiles a CTA of sm_86 has no room for 128 rows of x
#define GM_SHAPES(K, ...) GM_SMALL(K, __VA_ARGS__)
#endif
#endif

#ifdef __CUDACC__
#include "operands.cuh"
#include "operands_gguf.cuh"

#define GM_KERNEL(mt, warps, nx, nw, ctas, type, scales, ...)                             \
  extern "C" __global__ void __launch_bounds__(warps * 32, ctas)                          \
      gemm_##type##_##scales##_##mt##x##warps(const __grid_constant__ gm::GemmParams p) { \
    static_assert(__VA_ARGS__::kBytes == GM_TILE_BYTES);                                  \
    extern __shared__ __align__(128) uint8_t smem[];                                      \
    gm::Gemm<__VA_ARGS__, mt, warps, nx, nw>(p, smem).run();                              \
  }
#define GM_KERNELS(...) GM_SHAPES(GM_KERNEL, __VA_ARGS__)
GM_OPERANDS(GM_KERNELS)

#else  // host
#include "args.h"

namespace {

using Args = GmLinearFrag16Sm80Args;

enum { kType_any, kType_fp16, kType_bf16 };
struct Instance {
  int mt, warps, nx, nw, x_type, scale_type;
  gm::CudaKernel kernel;
};
#define GM_INSTANCE(mt, warps, nx, nw, ctas, type, scales, ...) \
  {mt, warps, nx, nw, kType_##type, kType_##scales, {GM_CUBIN, "gemm_" #type "_" #scales "_" #mt "x" #warps}},
#define GM_INSTANCES(...) GM_SHAPES(GM_INSTANCE, __VA_ARGS__)
Instance g_instances[] = {GM_OPERANDS(GM_INSTANCES)};

Instance* find(const Args& a) {
  for (Instance& one : g_instances)
    if (one.x_type == a.x_type && (one.scale_type == kType_any || one.scale_type == a.scale_type) &&
        one.mt == a.mt && one.warps == a.warps)
      return &one;
  return nullptr;
}

int run(const Args& a, Instance& one) {
  const int rows = one.warps * gm::kWarpTiles * gm::kTileRows;
  if (a.m < 0 || a.n < 1 || a.k < 1 || a.ldx < 0) return GM_E_SHAPE;
  if (a.grid < 1) return GM_E_ARG;
  const int64_t high = (int64_t(a.m) + one.mt - 1) / one.mt, blocks = high * gm::ceil_div(a.n, rows);
  gm::GemmParams p{};
  p.w = static_cast<const uint8_t*>(a.w), p.x = a.x, p.y = a.y, p.bias = a.bias, p.residual = a.residual;
  p.row_scale = a.row_scale, p.counters = a.counters, p.sums = a.sums;
  p.ldx = a.ldx, p.x_step = a.ldx * one.warps * 32 / 8 * 2, p.m = a.m, p.n = a.n, p.k = a.k;
  p.tiles = gm::ceil_div(a.n, gm::kTileRows), p.groups = gm::ceil_div(a.k, gm::kTileK);
  if (blocks * p.groups > INT32_MAX) return GM_E_SHAPE;
  p.high = int(high), p.blocks = p.whole = int(blocks);
  // Tiles are shared where every CTA gets a group of them, so that the CTAs of a tile follow each other.
  const int rest = p.blocks % a.grid;
  if (a.share && int64_t(rest) * p.groups >= a.grid) p.whole -= rest;
  p.scales_half = a.scale_type == 1;
  p.vectors = a.n % 8 == 0 && gm::is_aligned(a.y) && gm::is_aligned(a.residual);
  const int smem = one.nx * one.mt * gm::kXBytes + one.warps * one.nw * gm::kWarpTiles * GM_TILE_BYTES;
  if (a.device < 0) return smem;
  if (a.m == 0) return GM_OK;
  if (a.ldx % 8 != 0 || !gm::is_aligned(a.x)) return GM_E_ARG;
  const bool shared = p.whole < p.blocks;
  if (shared && (a.counters == nullptr || a.sums == nullptr)) return GM_E_ARG;
  const unsigned grid = shared || a.grid < p.blocks ? a.grid : p.blocks;
  void* arguments[] = {&p};
  return one.kernel.launch(a.device, a.stream,
                           {.grid_x = grid, .block = unsigned(one.warps * 32), .smem = unsigned(smem)},
                           arguments);
}

}  // namespace

#include "entry_point.h"

#endif
