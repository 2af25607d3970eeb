// The products of experts of one block-scaled format, and their entry point.
//
// A source _grouped_<format>_sm120f.cu defines
//   GM_ENTRY      the exported function, gm_grouped_<format>_sm120f
//   GM_FORMAT     a format of sm120/block_formats.h
//   GM_SHAPES(K)  K(rows of x, warps, slots, CTAs per multiprocessor) ...; linear/block_scaled_sm120/shapes.py has the same
// and includes this file: nvcc reads the kernels, the host compiler the entry.
#pragma once
#include "gm_cuda.h"
#include "grouped.cuh"

#ifdef __CUDACC__

#define GM_KERNEL(mt, warps, slots, ctas)                                                      \
  extern "C" __global__ void __launch_bounds__(warps * 32, ctas)                               \
      grouped_block_##mt##x##warps(const __grid_constant__ gm::block_scaled::ExpertParams p) { \
    extern __shared__ __align__(128) uint8_t smem[];                                           \
    gm::block_scaled::Grouped<GM_FORMAT, mt, warps, slots>(p, smem).run();                     \
  }
GM_SHAPES(GM_KERNEL)

#else  // host
#include "args.h"
#include "linear/block_scaled_sm120/instance.h"
#include "moe/expert_grid.h"

namespace {

using Args = GmGroupedBlockScaledArgs;
using Slot = gm::BlockSlot<GM_FORMAT>;

constexpr int kMaxExperts = 1024;

#define GM_INSTANCE(mt, warps, slots, ctas) {mt, warps, slots, {GM_CUBIN, "grouped_block_" #mt "x" #warps}},
gm::block_scaled::Instance g_instances[] = {GM_SHAPES(GM_INSTANCE)};

bool aligned_to_8(const void* at) { return reinterpret_cast<uintptr_t>(at) % 8 == 0; }

}  // namespace

// GM_OK, or an error; with a negative device the bytes of shared memory.
GM_CUDA_ARGS(GM_ENTRY, GmGroupedBlockScaledArgs)(const GmGroupedBlockScaledArgs* args) {
  const Args& a = *args;
  if (a.y_type != 1 && a.y_type != 2) return GM_E_DTYPE;
  if (a.rows < 0 || a.experts < 1 || a.experts > kMaxExperts || a.n < 1 || a.k < 1 || a.k % Slot::kColumns)
    return GM_E_SHAPE;
  // A lane stores up to eight columns at a time; the rows of up begin with a tile of 16.
  if (a.n % (a.silu_mul ? 32 : 8) || int64_t(a.experts) * a.n > INT32_MAX) return GM_E_SHAPE;
  gm::block_scaled::Instance* one = gm::block_scaled::find(g_instances, a.mt, a.warps);
  if (one == nullptr || a.grid < 1 || a.top_k < 1 || (a.clamp && !a.silu_mul)) return GM_E_ARG;
  gm::block_scaled::ExpertParams p{};
  p.y = a.y, p.bias = a.bias, p.x_factor = a.x_factor, p.w_factor = a.w_factor;
  p.x = static_cast<const uint8_t*>(a.x), p.w = static_cast<const uint8_t*>(a.w);
  p.x_scale = static_cast<const uint8_t*>(a.x_scale), p.w_scale = static_cast<const uint8_t*>(a.w_scale);
  p.offsets = a.offsets, p.permutation = a.permutation, p.top_k = a.top_k;
  p.experts = a.experts, p.n = a.n, p.slots = a.k / Slot::kColumns;
  p.gated = a.silu_mul != 0, p.clamp = a.clamp != 0, p.alpha = a.alpha, p.limit = a.limit;
  p.out_n = p.gated ? a.n / 2 : a.n, p.half = a.y_type == 1;
  const int rows = one->warps * gm::block_scaled::kWarpRows;
  p.blocks = gm::ceil_div(a.n, rows);
  const int smem =
      gm::block_scaled::ring_bytes<Slot>(*one) + gm::block_scaled::behind_ring(a.experts, one->mt);
  if (a.device < 0) return smem;
  if (a.rows == 0) return GM_OK;
  if (!gm::is_aligned(a.x) || !gm::is_aligned(a.w) || a.offsets == nullptr) return GM_E_ARG;
  if (!aligned_to_8(a.y) || !aligned_to_8(a.x_scale) || !aligned_to_8(a.w_scale)) return GM_E_ARG;
  const int64_t tiles = gm::most_expert_tiles(a.rows, a.experts, one->mt, p.blocks);
  if (tiles + a.grid > INT32_MAX) return GM_E_SHAPE;
  void* arguments[] = {&p};
  return one->kernel.launch(a.device, a.stream,
                            {.grid_x = unsigned(tiles < a.grid ? tiles : a.grid),
                             .block = unsigned(one->warps * 32),
                             .smem = unsigned(smem)},
                            arguments);
}

#endif
