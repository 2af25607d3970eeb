// The kernels of one weight format under the schedule decode for sm_75, and their entry point: ../frag16_sm80/decode.cuh with
// the instructions of sm75/primitives.cuh, M <= 8 and fp16.
//
// A source defines
//   GM_ENTRY        the exported function, gm_linear_<format>_decode_sm75
//   GM_DECODER      the decoder class
//   GM_TILE_BYTES   of a tile
//   GM_WORDS        of a tile that a lane holds
//   GM_MORE         registers per 8 rows of x that sums and scales of GGUF's formats take besides, 0 of others
// and includes this file: nvcc reads the kernels, the host compiler the entry.
#pragma once
#include "sm75/primitives.cuh"

#include "gm_cuda.h"
#include "linear/frag16_sm80/decode.cuh"

// Tiles per CTA, warps along K, groups ahead; decode.py has the same. Two slots of x, as copies are made at once.
#define GM_UP_TO_TWO(K) K(1, 8, 2) K(2, 8, 1) K(2, 4, 1)
#if GM_TILE_BYTES <= 1600
#define GM_SHAPES(K) GM_UP_TO_TWO(K) K(4, 4, 1)
#else  // four tiles of 6 or 8 bits do not fit into registers
#define GM_SHAPES(K) GM_UP_TO_TWO(K)
#endif
#define GM_SLOTS 2

#ifdef __CUDACC__
namespace gm {

// CTAs whose registers and threads a multiprocessor holds without spills: weights, x, sums of all groups and of one, and
// the rest.
constexpr int ctas(int rt, int wk, int pf, int words, int more) {
  const int registers = (pf + 1) * rt * words + 8 * rt + more + 44;
  const int by_registers = 65536 / (wk * 32 * ((registers + 7) / 8 * 8)), by_threads = 1024 / (wk * 32);
  return by_registers < by_threads ? by_registers : by_threads;
}

}  // namespace gm

#define GM_KERNEL(rt, wk, pf)                                                                    \
  extern "C" __global__ void __launch_bounds__(wk * 32, gm::ctas(rt, wk, pf, GM_WORDS, GM_MORE)) \
      decode_fp16_##rt##x##wk(const __grid_constant__ gm::DecodeParams p) {                      \
    static_assert(GM_DECODER::kBytes == GM_TILE_BYTES);                                          \
    gm::linear_decode<__half, GM_DECODER, 1, rt, wk, GM_SLOTS, pf>(p);                           \
  }
GM_SHAPES(GM_KERNEL)

#else  // host
#include "linear/frag16_sm80/args.h"

namespace {

struct Instance {
  int rt, wk;
  gm::CudaKernel kernel;
};
#define GM_INSTANCE(rt, wk, pf) {rt, wk, {GM_CUBIN, "decode_fp16_" #rt "x" #wk}},
Instance g_instances[] = {GM_SHAPES(GM_INSTANCE)};

}  // namespace

// y [m, n] = x [m, k] . W^T (times row_scale [n]) + bias + residual. Returns GM_OK, or an error.
GM_CUDA_ARGS(GM_ENTRY, GmLinearFrag16Sm80Args)(const GmLinearFrag16Sm80Args* args) {
  const GmLinearFrag16Sm80Args& a = *args;
  if (a.x_type != 1 || a.scale_type < 0 || a.scale_type > 2) return GM_E_DTYPE;
  Instance* one = nullptr;
  for (Instance& instance : g_instances)
    if (a.nt == 1 && instance.rt == a.rt && instance.wk == a.wk) one = &instance;
  if (one == nullptr) return GM_E_ARG;
  if (a.m < 0 || a.m > 8 || a.n < 1 || a.k < 1 || a.ldx < 0) return GM_E_SHAPE;
  if (a.split < 1 || a.split > 65535 || (a.split > 1 && (a.counters == nullptr || a.sums == nullptr)))
    return GM_E_ARG;
  if (a.m == 0) return GM_OK;
  gm::DecodeParams p{.w = static_cast<const uint8_t*>(a.w),
                     .x = a.x,
                     .y = a.y,
                     .bias = a.bias,
                     .residual = a.residual,
                     .row_scale = a.row_scale,
                     .counters = a.counters,
                     .sums = a.sums,
                     .ldx = a.ldx,
                     .m = a.m,
                     .n = a.n,
                     .k = a.k,
                     .tiles = gm::ceil_div(a.n, gm::kTileRows),
                     .groups = gm::ceil_div(a.k, gm::kTileK),
                     .xaligned = a.ldx % 8 == 0 && gm::is_aligned(a.x),
                     .scales_half = a.scale_type == 1};
  const int ring = one->wk * GM_SLOTS * a.m * 256, sums = one->wk * one->rt * 512;
  const unsigned smem = ring > sums ? ring : sums;
  if (a.device < 0) return smem;
  void* arguments[] = {&p};
  return one->kernel.launch(a.device, a.stream,
                            {.grid_x = unsigned(gm::ceil_div(p.tiles, one->rt)),
                             .grid_y = unsigned(a.split),
                             .block = unsigned(one->wk * 32),
                             .smem = smem},
                            arguments);
}

#endif
