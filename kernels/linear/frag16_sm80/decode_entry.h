// The kernels of one weight format under the schedule decode, and their entry point.
//
// A source _linear_<format>_decode_sm80.cu defines
//   GM_ENTRY        the exported function, gm_linear_<format>_decode_sm80
//   GM_DECODER(T)   the decoder class for x of type T
//   GM_TILE_BYTES   of a tile
//   GM_WORDS        of a tile that a lane holds
//   GM_MORE         of a format of decoders_gguf.cuh: registers per 8 rows of x that sums and scales take besides
// and includes this file: nvcc reads the kernels, the host compiler the entry.
#pragma once
#include "decode.cuh"
#include "gm_cuda.h"

// Columns of x in eights, tiles per CTA, warps along K, slots of x, groups ahead; decode.py has the same.
#ifdef GM_MORE
#define GM_UP_TO_TWO(K, ...)     \
  K(1, 1, 8, 3, 2, __VA_ARGS__)  \
  K(1, 1, 16, 3, 2, __VA_ARGS__) \
  K(1, 2, 8, 3, 2, __VA_ARGS__)  \
  K(2, 1, 8, 2, 1, __VA_ARGS__)  \
  K(2, 2, 8, 2, 1, __VA_ARGS__)
#if GM_TILE_BYTES < 1600  // 4 or 5 bits per weight
#define GM_SHAPES(K, ...) GM_UP_TO_TWO(K, __VA_ARGS__) K(1, 4, 8, 3, 1, __VA_ARGS__)
#else  // four tiles of 6 bits do not fit into registers
#define GM_SHAPES(K, ...) GM_UP_TO_TWO(K, __VA_ARGS__)
#endif
#else
#define GM_MORE 0
#if GM_TILE_BYTES < 2048  // 4 bits per weight
#define GM_SHAPES(K, ...)        \
  K(1, 1, 8, 3, 3, __VA_ARGS__)  \
  K(1, 2, 8, 3, 2, __VA_ARGS__)  \
  K(1, 2, 16, 3, 1, __VA_ARGS__) \
  K(1, 4, 8, 3, 1, __VA_ARGS__)  \
  K(2, 1, 8, 2, 2, __VA_ARGS__)  \
  K(2, 2, 8, 2, 1, __VA_ARGS__)
#else
#define GM_SHAPES(K, ...)        \
  K(1, 1, 8, 3, 2, __VA_ARGS__)  \
  K(1, 2, 8, 3, 1, __VA_ARGS__)  \
  K(1, 2, 16, 3, 1, __VA_ARGS__) \
  K(1, 4, 8, 3, 1, __VA_ARGS__)  \
  K(2, 1, 8, 2, 1, __VA_ARGS__)  \
  K(2, 2, 8, 2, 1, __VA_ARGS__)
#endif
#endif
#define GM_TYPES(K) GM_SHAPES(K, 2, bf16, __nv_bfloat16) GM_SHAPES(K, 1, fp16, __half)

#ifdef __CUDACC__
namespace gm {

// CTAs whose registers a multiprocessor holds without spills: weights, x, sums of all groups and of one, and the rest.
constexpr int ctas(int nt, int rt, int wk, int pf, int words, int more) {
  const int registers = (pf + 1) * rt * words + nt * (16 + 4 * rt + 4 + more) + 16;
  const int count = 65536 / (wk * 32 * ((registers + 7) / 8 * 8));
  return count > 0 ? count : 1;
}

}  // namespace gm

#define GM_KERNEL(nt, rt, wk, nx, pf, code, label, T)                                                \
  extern "C" __global__ void __launch_bounds__(wk * 32, gm::ctas(nt, rt, wk, pf, GM_WORDS, GM_MORE)) \
      decode_##label##_##nt##x##rt##x##wk(const __grid_constant__ gm::DecodeParams p) {              \
    static_assert(GM_DECODER(T)::kBytes == GM_TILE_BYTES);                                           \
    gm::linear_decode<T, GM_DECODER(T), nt, rt, wk, nx, pf>(p);                                      \
  }
GM_TYPES(GM_KERNEL)

#else  // host
#include "args.h"

namespace {

using Args = GmLinearFrag16Sm80Args;

struct Instance {
  int nt, rt, wk, nx, x_type;
  gm::CudaKernel kernel;
};
#define GM_INSTANCE(nt, rt, wk, nx, pf, code, label, T) \
  {nt, rt, wk, nx, code, {GM_CUBIN, "decode_" #label "_" #nt "x" #rt "x" #wk}},
Instance g_instances[] = {GM_TYPES(GM_INSTANCE)};

Instance* find(const Args& a) {
  for (Instance& one : g_instances)
    if (one.x_type == a.x_type && one.nt == a.nt && one.rt == a.rt && one.wk == a.wk) return &one;
  return nullptr;
}

int run(const Args& a, Instance& one) {
  if (a.m < 0 || a.m > one.nt * 8 || a.n < 1 || a.k < 1 || a.ldx < 0) return GM_E_SHAPE;
  if (a.split < 1 || a.split > 65535 || (a.split > 1 && (a.counters == nullptr || a.sums == nullptr)))
    return GM_E_ARG;
  if (a.m == 0) return GM_OK;
  gm::DecodeParams p{};
  p.w = static_cast<const uint8_t*>(a.w), p.x = a.x, p.y = a.y, p.bias = a.bias, p.residual = a.residual;
  p.row_scale = a.row_scale, p.counters = a.counters, p.sums = a.sums;
  p.ldx = a.ldx, p.m = a.m, p.n = a.n, p.k = a.k;
  p.tiles = gm::ceil_div(a.n, gm::kTileRows), p.groups = gm::ceil_div(a.k, gm::kTileK);
  p.xaligned = a.ldx % 8 == 0 && gm::is_aligned(a.x), p.scales_half = a.scale_type == 1;
  const int ring = one.wk * one.nx * a.m * 256, sums = one.wk * one.rt * one.nt * 512;
  const int smem = ring > sums ? ring : sums;
  if (a.device < 0) return smem;
  void* arguments[] = {&p};
  return one.kernel.launch(a.device, a.stream,
                           {.grid_x = unsigned(gm::ceil_div(p.tiles, one.rt)),
                            .grid_y = unsigned(a.split),
                            .block = unsigned(one.wk * 32),
                            .smem = unsigned(smem)},
                           arguments);
}

}  // namespace

#include "entry_point.h"

#endif
