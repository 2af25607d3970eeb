// The products of one block-scaled format, and their entry point.
//
// A source _linear_<format>_sm120f.cu defines
//   GM_ENTRY      the exported function, gm_linear_<format>_sm120f
//   GM_FORMAT     a format of sm120/block_formats.h
//   GM_SHAPES(K)  K(rows of x, warps, slots, CTAs per multiprocessor) ...; shapes.py has the same
// and includes this file: nvcc reads the kernels, the host compiler the entry.
#pragma once
#include "gm_cuda.h"
#include "product.cuh"

#ifdef __CUDACC__

#define GM_KERNEL(mt, warps, slots, ctas)                                               \
  extern "C" __global__ void __launch_bounds__(warps * 32, ctas)                        \
      block_scaled_##mt##x##warps(const __grid_constant__ gm::block_scaled::Params p) { \
    extern __shared__ __align__(128) uint8_t smem[];                                    \
    gm::block_scaled::Product<GM_FORMAT, mt, warps, slots>(p, smem).run();              \
  }
GM_SHAPES(GM_KERNEL)

#else  // host
#include "args.h"
#include "instance.h"
#include "sm80/stream_k.cuh"

namespace {

using Args = GmLinearBlockScaledArgs;
using Slot = gm::BlockSlot<GM_FORMAT>;

#define GM_INSTANCE(mt, warps, slots, ctas) {mt, warps, slots, {GM_CUBIN, "block_scaled_" #mt "x" #warps}},
gm::block_scaled::Instance g_instances[] = {GM_SHAPES(GM_INSTANCE)};

}  // namespace

// y [m, n] = factors of x and of W [n] times x [m, k] . W^T, + bias + residual.
// GM_OK, or an error; with a negative device the bytes of shared memory.
GM_CUDA_ARGS(GM_ENTRY, GmLinearBlockScaledArgs)(const GmLinearBlockScaledArgs* args) {
  const Args& a = *args;
  if (a.y_type != 1 && a.y_type != 2) return GM_E_DTYPE;
  if (a.m < 0 || a.n < 1 || a.k < 1 || a.k % Slot::kColumns) return GM_E_SHAPE;
  gm::block_scaled::Instance* one = gm::block_scaled::find(g_instances, a.mt, a.warps);
  if (one == nullptr || a.grid < 1) return GM_E_ARG;
  const int rows = one->warps * gm::block_scaled::kWarpRows;
  const int smem = gm::block_scaled::ring_bytes<Slot>(*one);
  gm::block_scaled::Params p{};
  p.y = a.y, p.bias = a.bias, p.residual = a.residual;
  p.x = static_cast<const uint8_t*>(a.x), p.w = static_cast<const uint8_t*>(a.w);
  p.x_scale = static_cast<const uint8_t*>(a.x_scale), p.w_scale = static_cast<const uint8_t*>(a.w_scale);
  p.x_factor = a.x_factor, p.w_factor = a.w_factor;
  p.counters = a.counters, p.sums = a.sums, p.m = a.m, p.n = a.n, p.k = a.k;
  p.groups = a.k / Slot::kColumns;
  if (!gm::deal_tiles(p, a, one->mt, rows)) return GM_E_SHAPE;
  p.half = a.y_type == 1;
  p.vectors = a.n % 8 == 0 && gm::is_aligned(a.y) && gm::is_aligned(a.residual);
  if (a.device < 0) return smem;
  if (a.m == 0) return GM_OK;
  if (!gm::is_aligned(a.x) || !gm::is_aligned(a.w)) return GM_E_ARG;
  if (reinterpret_cast<uintptr_t>(a.x_scale) % 8 || reinterpret_cast<uintptr_t>(a.w_scale) % 8)
    return GM_E_ARG;
  return gm::launch_tiles(one->kernel, p, a, one->warps, smem);
}

#endif
