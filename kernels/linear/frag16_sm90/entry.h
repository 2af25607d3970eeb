// The kernels of one weight format under one schedule, and their entry point.
//
// CMake writes a source per format from each _linear_<schedule>_sm90.cu.in and instances.json. It includes
// the schedule, defines
//   GM_ENTRY         the exported function, gm_linear_<format>_<schedule>_sm90
//   GM_SCHEDULE      GM_DECODE, GM_DECODE_WS or GM_GEMM_WS
//   GM_BITS, GM_TILE_BYTES     of a code, of a tile
//   GM_SHARED_BYTES            dynamic shared memory, an expression of the names in `run` (decode schedules)
//   GM_MAX_DEPTH, GM_FLAG_BYTES, GM_CTA_BYTES, GM_RESERVED_BYTES    the table's limits
//   GM_DECODERS      an alias per decoder class
//   GM_INSTANCES(K)  K(name, x_type, scale_type, T, W, shape...) per kernel
// and includes this file: nvcc reads the kernels, the host compiler the entry.
#pragma once
#include "gm_cuda.h"
#include "tile.h"

#define GM_DECODE 1
#define GM_DECODE_WS 2
#define GM_GEMM_WS 3

#if GM_SCHEDULE == GM_GEMM_WS
static_assert(gm::kFlagBytes == GM_FLAG_BYTES, "flag_bytes of instances.json");
static_assert(gm::kSharedBytes == GM_CTA_BYTES - GM_RESERVED_BYTES, "cta_bytes of instances.json");
#define GM_SLOTS(of_4_bits, of_8_bits) (GM_BITS == 8 ? of_8_bits : of_4_bits)
#else
static_assert(gm::kMaxDepth == GM_MAX_DEPTH, "max_depth of instances.json");
#endif

#ifdef __CUDACC__

namespace gm {
GM_DECODERS
}  // namespace gm

#define GM_CHECKED(W) static_assert(W::kBytes == GM_TILE_BYTES, "tile_bytes of instances.json")

#if GM_SCHEDULE == GM_DECODE
#define GM_KERNEL(name, x_type, scale_type, T, W, nt, rt, c, wk, nx, ctas)            \
  extern "C" __global__ void __launch_bounds__(wk * 32, gm::ctas_per_sm<W, nt>(ctas)) \
      name(const __grid_constant__ gm::DecodeParams p) {                              \
    GM_CHECKED(W);                                                                    \
    gm::linear_decode<T, W, nt, rt, c, wk, nx>(p);                                    \
  }
#elif GM_SCHEDULE == GM_DECODE_WS
#define GM_KERNEL(name, x_type, scale_type, T, W, nt, rt, wn, wk)                               \
  extern "C" __global__ void __launch_bounds__(wn * wk * 32 + 128, 1)                           \
      name(const __grid_constant__ gm::DecodeParams p, const __grid_constant__ CUtensorMap x) { \
    GM_CHECKED(W);                                                                              \
    gm::linear_decode_ws<T, W, nt, rt, wn, wk>(p, x);                                           \
  }
#else
#define GM_GEMM_WS_KERNEL(name, W, gated, mt, c, slices, ctas, xs, ws, chains, pending)        \
  extern "C" __global__ void __launch_bounds__(                                                \
      gm::Cta<mt, c, slices, ctas, xs, ws, GM_TILE_BYTES>::kThreads, ctas)                     \
      name(const __grid_constant__ gm::GemmParams p, const __grid_constant__ CUtensorMap x,    \
           const __grid_constant__ CUtensorMap y) {                                            \
    GM_CHECKED(W);                                                                             \
    extern __shared__ __align__(1024) uint8_t smem[];                                          \
    gm::linear_gemm_ws<W, gated, mt, c, slices, ctas, xs, ws, chains, pending>(p, x, y, smem); \
  }
#define GM_KERNEL(name, x_type, scale_type, T, W, mt, c, slices, ctas, xs4, xs8, ws4, ws8, chains, pending) \
  GM_GEMM_WS_KERNEL(name, W, false, mt, c, slices, ctas, GM_SLOTS(xs4, xs8), GM_SLOTS(ws4, ws8), chains,    \
                    pending)                                                                                \
  GM_GEMM_WS_KERNEL(name##_gated, W, true, mt, c, slices, ctas, GM_SLOTS(xs4, xs8), GM_SLOTS(ws4, ws8),     \
                    chains, pending)
#endif
GM_INSTANCES(GM_KERNEL)

#else  // host
#include "args.h"

namespace {

using Args = GmLinearFrag16Args;

[[maybe_unused]] constexpr int tile_bytes = GM_TILE_BYTES;  // as GM_SHARED_BYTES calls it
[[maybe_unused]] constexpr int max(int a, int b) { return a > b ? a : b; }
using gm::ceil_div;

#if GM_SCHEDULE == GM_DECODE

struct Shape {
  int nt, rt, c, wk, nx, ctas;
  bool is(const Args& a) const { return nt == a.nt && rt == a.rt && wk == a.wk; }
};
#define GM_INSTANCE(name, x_type, scale_type, T, W, ...) \
  {x_type, scale_type, {__VA_ARGS__}, {GM_CUBIN, #name}},

#elif GM_SCHEDULE == GM_DECODE_WS

struct Shape {
  int nt, rt, wn, wk;
  bool is(const Args& a) const { return nt == a.nt && rt == a.rt && wn == a.wn && wk == a.wk; }
};
#define GM_INSTANCE(name, x_type, scale_type, T, W, ...) \
  {x_type, scale_type, {__VA_ARGS__}, {GM_CUBIN, #name}},

#else

struct Shape {
  int mt, c, slices, ctas, xs, ws, threads, smem;
  bool gated, staggered, by_tma;
  bool is(const Args& a) const {
    return mt == a.mt && c == a.c && slices == a.slices && ctas == a.ctas && gated == (a.gated != 0);
  }
};
template <int MT, int C, int SLICES, int CTAS, int XS, int WS>
constexpr Shape shape_of(bool gated) {
  using Cta = gm::Cta<MT, C, SLICES, CTAS, XS, WS, GM_TILE_BYTES>;
  return {MT,
          C,
          SLICES,
          CTAS,
          XS,
          WS,
          Cta::kThreads,
          Cta::kSharedMemory,
          gated,
          Cta::kStaggered,
          Cta::kWhole && !gated};
}
#define GM_GEMM_WS_INSTANCE(name, x_type, scale_type, gated, ...) \
  {x_type, scale_type, shape_of<__VA_ARGS__>(gated), {GM_CUBIN, name}},
#define GM_INSTANCE(name, x_type, scale_type, T, W, mt, c, slices, ctas, xs4, xs8, ws4, ws8, chains,     \
                    pending)                                                                             \
  GM_GEMM_WS_INSTANCE(#name, x_type, scale_type, false, mt, c, slices, ctas, GM_SLOTS(xs4, xs8),         \
                      GM_SLOTS(ws4, ws8))                                                                \
  GM_GEMM_WS_INSTANCE(#name "_gated", x_type, scale_type, true, mt, c, slices, ctas, GM_SLOTS(xs4, xs8), \
                      GM_SLOTS(ws4, ws8))

#endif

struct Instance {
  int x_type, scale_type;  // scale_type 0: any
  Shape shape;
  gm::CudaKernel kernel;
};
Instance g_instances[] = {GM_INSTANCES(GM_INSTANCE)};

Instance* find(const Args& a) {
  for (Instance& one : g_instances)
    if (one.x_type == a.x_type && (one.scale_type == 0 || one.scale_type == a.scale_type) && one.shape.is(a))
      return &one;
  return nullptr;
}

bool is_split(int split) { return split == 1 || split == 2 || split == 4 || split == 8; }

#if GM_SCHEDULE != GM_DECODE
// TMA needs x and its rows 16-byte aligned.
bool is_copyable(const Args& a) {
  return a.ldx >= a.k && a.ldx % 8 == 0 && reinterpret_cast<uintptr_t>(a.x) % 16 == 0;
}
#endif

#if GM_SCHEDULE == GM_GEMM_WS

int run(const Args& a, const Shape& shape, gm::CudaKernel& kernel) {
  if (a.grid < 1 || a.grid > gm::kFlagBytes / (a.c * a.slices * 16) || a.raster < 1) return GM_E_ARG;
  // The first half consumes `lag` groups, and waits for the next, before the second half releases any.
  if (a.lag < 0 || a.lag * 2 >= shape.xs || a.lag >= shape.ws ||
      (a.lag > 0 && (a.split > 1 || !shape.staggered)))
    return GM_E_ARG;
  // Each CTA of a cluster adds up the same number of fragments.
  if (a.mt / 8 / a.slices % a.split != 0 || a.even < 0 || a.even > 2) return GM_E_ARG;
  // A CTA of several slices has one tile, and a group of 128 k for each of them.
  if (a.slices > 1 && (a.even || ceil_div(a.k, gm::kTileK) / a.split < a.slices)) return GM_E_ARG;
  if (a.m < 0 || a.n < 1 || a.k < 1 || !is_copyable(a)) return GM_E_SHAPE;
  if (a.gated && a.n % 64 != 0)
    return GM_E_SHAPE;  // 32 rows of gate and of up are what two pairs of warps share
  if (a.device < 0) return shape.smem;
  if (a.m == 0) return GM_OK;

  gm::GemmParams p{};
  p.w = static_cast<const uint8_t*>(a.w), p.y = a.y, p.bias = a.bias, p.residual = a.residual;
  p.row_scale = a.row_scale, p.scratch = static_cast<uint8_t*>(a.scratch);
  p.m = a.m, p.n = a.gated ? a.n / 2 : a.n;
  p.groups = ceil_div(a.k, gm::kTileK), p.tiles16 = ceil_div(a.n, gm::kTileRows);
  p.n_tiles = ceil_div(a.n, a.c * 64), p.m_tiles = ceil_div(a.m, a.mt);
  p.raster = a.raster < p.m_tiles ? a.raster : p.m_tiles;
  p.by_groups = gm::reciprocal(p.groups), p.by_band = gm::reciprocal(p.raster * p.n_tiles);
  p.by_raster = gm::reciprocal(p.raster), p.by_rest = gm::reciprocal(p.m_tiles % p.raster);
  p.log_split = __builtin_ctz(unsigned(a.split)), p.scales_half = a.scale_type == 1;
  p.vector = p.n % 8 == 0 && reinterpret_cast<uintptr_t>(a.y) % 16 == 0 &&
             reinterpret_cast<uintptr_t>(a.residual) % 16 == 0;

  CUtensorMap map;  // k past the end reads as 0
  const int status = gm::rows_map(&map, gm::float16_type(a.x_type == 2), a.x, uint64_t(a.k), uint64_t(a.m),
                                  uint64_t(a.ldx) * 2, gm::kXSlotK, unsigned(a.mt));
  if (status != GM_OK) return status;
  const int64_t tiles = int64_t(p.n_tiles) * p.m_tiles, grid = a.grid;
  if (tiles * a.split > INT32_MAX) return GM_E_SHAPE;
  if (a.split == 1 && a.even && tiles % grid != 0) {
    const int64_t rest = tiles % grid;
    const int64_t shared = a.even == 2 ? rest : tiles < 2 * grid ? tiles : rest + grid;
    const int64_t units = shared * p.groups;
    if (units >= grid) {
      if (a.scratch == nullptr) return GM_E_ARG;
      p.shared_tiles = int(shared), p.part_groups = int(units / grid), p.longer_parts = int(units % grid);
    }
  }
  // The second half waits for a slot of x, which each CTA has to fill.
  p.lag = a.lag < (p.shared_tiles > 0 ? p.part_groups : p.groups) ? a.lag : 0;
  const bool one_tile = a.split > 1 || a.slices > 1;  // per CTA, which is not persistent
  const int64_t ctas = one_tile ? tiles * a.split : p.shared_tiles == 0 && tiles < grid ? tiles : grid;
  CUtensorMap y_map{};
  p.by_tma = shape.by_tma && p.vector && a.residual == nullptr && a.split == 1;
  if (p.by_tma) {
    const int made = gm::rows_map(&y_map, gm::float16_type(a.x_type == 2), a.y, uint64_t(a.n), uint64_t(a.m),
                                  uint64_t(a.n) * 2, 64, unsigned(a.mt));
    if (made != GM_OK) return made;
  }
  void* arguments[] = {&p, &map, &y_map};
  return kernel.launch(a.device, a.stream,
                       {.grid_x = unsigned(ctas),
                        .block = unsigned(shape.threads),
                        .smem = unsigned(shape.smem),
                        .cluster = unsigned(a.split),
                        .pdl = a.pdl != 0},
                       arguments);
}

#else

gm::DecodeParams params_of(const Args& a) {
  gm::DecodeParams p{};
  p.w = static_cast<const uint8_t*>(a.w), p.x = a.x, p.y = a.y, p.bias = a.bias, p.residual = a.residual;
  p.row_scale = a.row_scale;
  p.m = a.m, p.n = a.n, p.k = a.k, p.ldx = int(a.ldx);
  p.tiles = ceil_div(a.n, gm::kTileRows), p.groups = ceil_div(a.k, gm::kTileK);
  p.log_split = __builtin_ctz(unsigned(a.split)), p.scales_half = a.scale_type == 1;
  return p;
}

#if GM_SCHEDULE == GM_DECODE

int run(const Args& a, const Shape& shape, gm::CudaKernel& kernel) {
  const auto [nt, rt, c, wk, nx, ctas] = shape;
  const int m = a.m, split = a.split;
  if (a.depth < 1) return GM_E_ARG;
  if (m < 0 || m > nt * 8 || a.n < 1 || a.k < 1 || a.ldx < 0 || a.ldx > INT32_MAX / 64) return GM_E_SHAPE;
  if (m == 0) return GM_OK;

  gm::DecodeParams p = params_of(a);
  p.xaligned = a.ldx % 8 == 0 && reinterpret_cast<uintptr_t>(a.x) % 16 == 0;
  // Whole steps along K, and no more slots than steps.
  const int sub = rt / c, chunks = ceil_div(ceil_div(p.groups, split), wk) * sub;
  int slots = (a.depth < chunks ? a.depth : chunks) / sub * sub;
  if (slots < sub) slots = sub;
  if (slots > gm::kMaxDepth) slots = gm::kMaxDepth / sub * sub;
  p.depth = slots;
  p.exchange = wk * rt * nt * 512;
  const int smem = GM_SHARED_BYTES;
  if (smem + wk * gm::kMaxDepth * 8 + GM_RESERVED_BYTES > GM_CTA_BYTES) return GM_E_ARG;
  if (a.device < 0) return smem;
  void* arguments[] = {&p};
  return kernel.launch(a.device, a.stream,
                       {.grid_x = unsigned(ceil_div(p.tiles, rt) * split),
                        .block = unsigned(wk * 32),
                        .smem = unsigned(smem),
                        .cluster = unsigned(split),
                        .pdl = a.pdl != 0},
                       arguments);
}

#else

int run(const Args& a, const Shape& shape, gm::CudaKernel& kernel) {
  const auto [nt, rt, wn, wk] = shape;
  const int m = a.m, split = a.split, depth = a.depth;
  // A slice always has the same slots, whose phase it tracks by a parity.
  if (depth < wk || depth % wk != 0 || depth > gm::kMaxDepth) return GM_E_ARG;
  if (m < 0 || m > nt * 8 || a.n < 1 || a.k < 1 || a.ldx > INT32_MAX / 64 || !is_copyable(a))
    return GM_E_SHAPE;

  gm::DecodeParams p = params_of(a);
  p.depth = depth;
  p.exchange = wn * wk * rt * nt * 512;
  const int smem = GM_SHARED_BYTES;
  p.bars = smem - 2 * gm::kMaxDepth * 8;
  if (smem + GM_RESERVED_BYTES > GM_CTA_BYTES) return GM_E_ARG;
  if (a.device < 0) return smem;
  if (m == 0) return GM_OK;

  CUtensorMap map;  // k past the end reads as 0
  const int status = gm::rows_map(&map, gm::float16_type(a.x_type == 2), a.x, uint64_t(a.k), uint64_t(m),
                                  uint64_t(a.ldx) * 2, gm::kTileK / 2, unsigned(nt * 8));
  if (status != GM_OK) return status;
  void* arguments[] = {&p, &map};
  return kernel.launch(a.device, a.stream,
                       {.grid_x = unsigned(ceil_div(p.tiles, rt * wn) * split),
                        .block = unsigned(wn * wk * 32 + 128),
                        .smem = unsigned(smem),
                        .cluster = unsigned(split),
                        .pdl = a.pdl != 0},
                       arguments);
}

#endif
#endif

}  // namespace

// y [m, n] = x [m, k] . W^T (times row_scale [n]) + bias + residual; with `gated` y [m, n / 2] = silu(gate) * up + residual.
// Returns GM_OK, or an error.
GM_CUDA_ARGS(GM_ENTRY, GmLinearFrag16Args)(const GmLinearFrag16Args* args) {
  if ((args->x_type != 1 && args->x_type != 2) || args->scale_type < 0 || args->scale_type > 2)
    return GM_E_DTYPE;
  Instance* one = find(*args);
  if (one == nullptr || !is_split(args->split)) return GM_E_ARG;
  return run(*args, one->shape, one->kernel);
}

#endif
