// The kernels of grouped linear for one weight format, and their entry point.
//
// A source defines
//   GM_ENTRY        the exported function, gm_grouped_linear_<format>_sm90
//   GM_NAME(rest)   the name of a kernel, grouped_<format>_<rest>
//   GM_TILE_BYTES   of a tile of the format
//   GM_DECODERS     aliases Decoder_<variant> of classes of decoders_wgmma.cuh
//   GM_VARIANTS(K)  K(variant, type of x, type of the scales or 0 for any) per alias
// and includes this file: nvcc reads the kernels, the host compiler the entry.
#pragma once
#include "gm_cuda.h"
#include "grouped_ws.cuh"

// K(variant..., mt, c, slices, ctas, xs, ws of 4-bit weights, ws of 8-bit weights, chains, pending)
#define GM_SHAPES(K, ...)                      \
  K(__VA_ARGS__, 8, 2, 2, 1, 32, 16, 8, 2, 2)  \
  K(__VA_ARGS__, 8, 1, 4, 1, 64, 28, 16, 2, 2) \
  K(__VA_ARGS__, 8, 2, 1, 2, 16, 8, 4, 2, 2)   \
  K(__VA_ARGS__, 16, 2, 1, 2, 12, 8, 4, 2, 2)  \
  K(__VA_ARGS__, 32, 2, 1, 2, 8, 6, 3, 2, 2)   \
  K(__VA_ARGS__, 64, 2, 1, 2, 6, 5, 2, 1, 2)   \
  K(__VA_ARGS__, 128, 2, 1, 1, 8, 6, 3, 1, 1)
#define GM_SLOTS(ws4, ws8) (GM_TILE_BYTES < 1500 ? ws4 : ws8)

#ifdef __CUDACC__

namespace gm {
GM_DECODERS
}  // namespace gm

#define GM_KERNEL(variant, x_type, scale_type, mt, c, slices, ctas, xs, ws4, ws8, chains, pending)    \
  extern "C" __global__ void __launch_bounds__(gm::GroupedCta<mt, c, slices, ctas>::kThreads, ctas)   \
      GM_NAME(variant##_##mt##x##c##x##slices##x##ctas)(const __grid_constant__ gm::GroupedParams p,  \
                                                        const __grid_constant__ CUtensorMap x) {      \
    static_assert(gm::Decoder_##variant::kBytes == GM_TILE_BYTES);                                    \
    gm::grouped_linear_ws<gm::Decoder_##variant, mt, c, slices, ctas, xs, GM_SLOTS(ws4, ws8), chains, \
                          pending>(p, x);                                                             \
  }
#define GM_KERNELS(...) GM_SHAPES(GM_KERNEL, __VA_ARGS__)
GM_VARIANTS(GM_KERNELS)

#else  // host
#include "args.h"
#include "moe/expert_grid.h"

namespace {

using Args = GmGroupedFrag16Args;

constexpr int kMaxExperts = 1024;

struct Instance {
  int x_type, scale_type;  // scale_type 0: any
  int mt, c, slices, ctas, threads, smem;
  gm::CudaKernel kernel;
  bool is(const Args& a) const {
    return x_type == a.x_type && (scale_type == 0 || scale_type == a.scale_type) && mt == a.mt && c == a.c &&
           slices == a.slices && ctas == a.ctas;
  }
};
#define GM_TEXT_OF(name) #name
#define GM_TEXT(name) GM_TEXT_OF(name)
#define GM_INSTANCE(variant, x_type, scale_type, mt, c, slices, ctas, xs, ws4, ws8, chains, pending) \
  {x_type,                                                                                           \
   scale_type,                                                                                       \
   mt,                                                                                               \
   c,                                                                                                \
   slices,                                                                                           \
   ctas,                                                                                             \
   gm::GroupedCta<mt, c, slices, ctas>::kThreads,                                                    \
   gm::GroupedCta<mt, c, slices, ctas>::smem(xs, GM_SLOTS(ws4, ws8), GM_TILE_BYTES),                 \
   {GM_CUBIN, GM_TEXT(GM_NAME(variant##_##mt##x##c##x##slices##x##ctas))}},
#define GM_ROWS(...) GM_SHAPES(GM_INSTANCE, __VA_ARGS__)
Instance g_instances[] = {GM_VARIANTS(GM_ROWS)};

using gm::ceil_div;

int run(const Args& a, Instance& one) {
  if (a.grid < 1 || a.top_k < 1 || a.offsets == nullptr) return GM_E_ARG;
  if (a.rows < 0 || a.x_rows < 0 || a.experts < 1 || a.experts > kMaxExperts || a.n < 1 || a.k < 1)
    return GM_E_SHAPE;
  // 16-byte chunks of x; with silu_mul the rows of up begin with a tile.
  if (a.k % 8 || a.ldx % 8 || a.ldx < a.k || reinterpret_cast<uintptr_t>(a.x) % 16) return GM_E_SHAPE;
  if (a.silu_mul && (a.n % (2 * gm::kTileRows) || a.c != 2)) return GM_E_ARG;
  gm::GroupedParams p{};
  p.groups = ceil_div(a.k, gm::kTileK), p.tiles16 = ceil_div(a.n, gm::kTileRows);
  if (p.groups < a.slices) return GM_E_ARG;
  if (a.permutation != nullptr && a.x_rows * (a.ldx / 8) > UINT32_MAX) return GM_E_SHAPE;
  const int smem = one.smem + 8 * (a.experts + 1);
  if (a.device < 0) return smem;
  if (a.rows == 0) return GM_OK;

  p.w = static_cast<const uint8_t*>(a.w), p.y = a.y, p.x = a.x;
  p.offsets = a.offsets, p.permutation = a.permutation, p.row_scale = a.row_scale;
  p.x_chunks = uint32_t(a.ldx / 8), p.expert_bytes = int64_t(p.tiles16) * p.groups * GM_TILE_BYTES;
  p.rows = a.rows, p.experts = a.experts, p.n = a.n, p.k = a.k;
  p.gated = a.silu_mul != 0, p.out_n = p.gated ? a.n / 2 : a.n;
  p.blocks = p.gated ? ceil_div(p.tiles16 / 2, 4) : ceil_div(p.tiles16, a.c * 4);
  p.top_k = a.top_k, p.by_top_k = gm::reciprocal(a.top_k), p.by_blocks = gm::reciprocal(p.blocks);
  p.scales_half = a.scale_type == 1, p.early = a.early, p.clear = a.clear;
  p.vector = p.out_n % 8 == 0 && reinterpret_cast<uintptr_t>(a.y) % 16 == 0;

  CUtensorMap map{};  // k past the end reads as 0
  if (a.permutation == nullptr) {
    const int status = gm::rows_map(&map, gm::float16_type(a.x_type == 2), a.x, uint64_t(a.k),
                                    uint64_t(a.x_rows), uint64_t(a.ldx) * 2, gm::kXSlotK, unsigned(a.mt));
    if (status != GM_OK) return status;
  }
  const int64_t tiles = gm::most_expert_tiles(a.rows, a.experts, a.mt, p.blocks);
  if (tiles > INT32_MAX) return GM_E_SHAPE;
  void* arguments[] = {&p, &map};
  return one.kernel.launch(a.device, a.stream,
                           {.grid_x = unsigned(tiles < a.grid ? tiles : a.grid),
                            .block = unsigned(one.threads),
                            .smem = unsigned(smem),
                            .pdl = a.pdl != 0},
                           arguments);
}

}  // namespace

// y[p, :] = x[token of p, :] . W[expert of p]^T, or silu(gate) * up of it. Returns GM_OK, or an error.
GM_CUDA_ARGS(GM_ENTRY, GmGroupedFrag16Args)(const GmGroupedFrag16Args* args) {
  if ((args->x_type != 1 && args->x_type != 2) || args->scale_type < 0 || args->scale_type > 2)
    return GM_E_DTYPE;
  for (Instance& one : g_instances)
    if (one.is(*args)) return run(*args, one);
  return GM_E_ARG;
}

#endif
