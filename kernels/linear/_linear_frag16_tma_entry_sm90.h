// The shapes of a CTA that linear_tma is compiled for, the kernels of one weight format over them, and their
// entry point.
//
// A source file defines GM_ENTRY (the exported function), GM_TILE_BYTES (of the format's tile), GM_WIDE_TILES
// (1: of 8-bit weights) and GM_KERNELS(K), a list of K(label, dtype, scale_dtype, W, SHAPES): W is the
// template argument, dtype 1 (fp16) or 2 (bf16) that of x, scale_dtype that of 16-bit scales (0: any), SHAPES
// one of the two lists below. Then it includes this file.
#include "_linear_frag16_tma_sm90.cuh"
#include "gm_cuda.h"

// (rows of x, blocks of 64 rows of W, slices along K, CTAs a multiprocessor, slots of x, slots of 4-bit and
// of 8-bit weights, sums that products take turns at, products at work), the same lists as in
// frag16_tma_shapes.py.
#define GM_ALL(S, ...)                                                                    \
  GM_FEW(S, __VA_ARGS__)                                                                  \
  S(__VA_ARGS__, 128, 4, 1, 1, 7, 4, 2, 1, 1) S(__VA_ARGS__, 64, 1, 4, 1, 16, 8, 4, 1, 2) \
      S(__VA_ARGS__, 128, 1, 2, 1, 8, 8, 4, 1, 1)
#define GM_FEW(S, ...)                                                                   \
  S(__VA_ARGS__, 32, 2, 1, 2, 8, 6, 4, 2, 2)                                             \
  S(__VA_ARGS__, 64, 2, 1, 2, 6, 5, 3, 1, 2) S(__VA_ARGS__, 128, 2, 1, 1, 8, 6, 5, 1, 1) \
      S(__VA_ARGS__, 256, 2, 1, 1, 5, 5, 3, 1, 1)

#define GM_JOIN2(a, b, c, d, e) linear_tma_##a##_##b##x##c##x##d##x##e
#define GM_NAME(label, mt, c, slices, ctas) GM_JOIN2(label, mt, c, slices, ctas)

#ifdef __CUDACC__

#define GM_ONE(label, W, mt, c, slices, ctas, xs, ws4, ws8, chains, pending)                      \
  extern "C" __global__ void __launch_bounds__(gm::Cta<mt, c, slices, ctas>::kThreads, ctas)      \
      GM_NAME(label, mt, c, slices, ctas)(const __grid_constant__ gm::TmaParams p,                \
                                          const __grid_constant__ CUtensorMap x) {                \
    static_assert(W::kBytes == GM_TILE_BYTES);                                                    \
    gm::linear_tma<W, mt, c, slices, ctas, xs, GM_WIDE_TILES ? ws8 : ws4, chains, pending>(p, x); \
  }
#define GM_EACH(label, dtype, scale_dtype, W, SHAPES) SHAPES(GM_ONE, label, W)
GM_KERNELS(GM_EACH)

#else

namespace {

struct Shape {
  int dtype, scale_dtype, mt, c, slices, ctas, xs, ws, threads, smem;
  bool turns;
  gm::CudaKernel kernel;
};

#define GM_TEXT2(x) #x
#define GM_TEXT(x) GM_TEXT2(x)
#define GM_ONE(label, dtype, scale_dtype, mt, c, slices, ctas, xs, ws4, ws8, chains, pending) \
  {dtype,                                                                                     \
   scale_dtype,                                                                               \
   mt,                                                                                        \
   c,                                                                                         \
   slices,                                                                                    \
   ctas,                                                                                      \
   xs,                                                                                        \
   GM_WIDE_TILES ? ws8 : ws4,                                                                 \
   gm::Cta<mt, c, slices, ctas>::kThreads,                                                    \
   gm::Cta<mt, c, slices, ctas>::smem(xs, GM_WIDE_TILES ? ws8 : ws4, GM_TILE_BYTES),          \
   gm::Cta<mt, c, slices, ctas>::kTurns,                                                      \
   {GM_CUBIN, GM_TEXT(GM_NAME(label, mt, c, slices, ctas))}},
#define GM_EACH(label, dtype, scale_dtype, W, SHAPES) SHAPES(GM_ONE, label, dtype, scale_dtype)
Shape g_shapes[] = {GM_KERNELS(GM_EACH)};

int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace

// y [m, n] = x [m, k] . W^T (times row_scale [n]) + bias + residual; dtype 1 is fp16, 2 bf16, of x and y;
// scale_dtype that of 16-bit scales. mt, c, slices, ctas name a shape; split CTAs share a tile along K, and
// without that `grid` CTAs walk over the tiles, `raster` of them along M side by side. even: the last tiles
// are dealt out along K, one or two tiles' worth for each CTA (1: few sums to add) or only what is left over
// by whole tiles (2: CTAs go along K together, and find each other's x and W in L2). Then scratch holds 65536
// bytes that are zero, and grid * mt * c * 256 more. lag: groups that the second half of a CTA's warpgroups
// stays behind the first, so that one half multiplies while the other stores; only of shapes with four
// warpgroups of their own rows. x must be 16-byte aligned, its rows (ldx elements apart) too. device < 0 asks
// for the bytes of shared memory. A CTA of several slices has one tile: `grid` does not count, `even` is
// refused, and groups / split must be as many.
GM_CUDA_ENTRY(GM_ENTRY)
(void* y, const void* x, int64_t ldx, const void* w, const void* bias, const void* residual,
 const void* row_scale, void* scratch, int m, int n, int k, int dtype, int scale_dtype, int mt, int c,
 int slices, int ctas, int split, int grid, int raster, int even, int lag, int pdl, int device,
 void* stream) {
  if ((dtype != 1 && dtype != 2) || scale_dtype < 0 || scale_dtype > 2) return GM_E_DTYPE;
  Shape* shape = nullptr;
  for (Shape& s : g_shapes)
    if (s.dtype == dtype && (s.scale_dtype == 0 || s.scale_dtype == scale_dtype) && s.mt == mt && s.c == c &&
        s.slices == slices && s.ctas == ctas)
      shape = &s;
  if (shape == nullptr || grid < 1 || grid > gm::kFlagBytes / (c * slices * 16) || raster < 1)
    return GM_E_ARG;
  // The first half uses up `lag` groups, and waits for the next, before the second gives back any.
  if (lag < 0 || lag * 2 >= shape->xs || lag >= shape->ws || (lag > 0 && (split > 1 || !shape->turns)))
    return GM_E_ARG;
  if ((split != 1 && split != 2 && split != 4 && split != 8) || split > mt / 8 / slices) return GM_E_ARG;
  if (even < 0 || even > 2) return GM_E_ARG;
  if (slices > 1 && (even || ceil_div(k, gm::kTileK) / split < slices)) return GM_E_ARG;
  if (m < 0 || n < 1 || k < 1 || ldx < k || ldx % 8 != 0 || reinterpret_cast<uintptr_t>(x) % 16 != 0)
    return GM_E_SHAPE;
  if (device < 0) return shape->smem;
  if (m == 0) return GM_OK;

  gm::TmaParams p{};
  p.w = static_cast<const uint8_t*>(w), p.y = y, p.bias = bias, p.residual = residual,
  p.row_scale = static_cast<const float*>(row_scale);
  p.scratch = static_cast<uint8_t*>(scratch);
  p.m = m, p.n = n, p.groups = ceil_div(k, gm::kTileK), p.tiles16 = ceil_div(n, gm::kTileRows);
  p.n_tiles = ceil_div(n, c * 64), p.m_tiles = ceil_div(m, mt),
  p.raster = raster < p.m_tiles ? raster : p.m_tiles;
  p.by_groups = gm::reciprocal(p.groups), p.by_band = gm::reciprocal(p.raster * p.n_tiles),
  p.by_raster = gm::reciprocal(p.raster);
  p.by_rest = gm::reciprocal(p.m_tiles % p.raster), p.lag = lag;
  p.log_split = __builtin_ctz(unsigned(split)), p.scales_half = scale_dtype == 1;
  p.vector = n % 8 == 0 && reinterpret_cast<uintptr_t>(y) % 16 == 0 &&
             reinterpret_cast<uintptr_t>(residual) % 16 == 0;

  CUtensorMap map;  // k past the end reads as 0
  const int status =
      gm::rows_map(&map, x, dtype == 2, uint64_t(k), uint64_t(m), uint64_t(ldx), gm::kXSlotK, unsigned(mt));
  if (status != GM_OK) return status;
  const int64_t tiles = int64_t(p.n_tiles) * p.m_tiles;
  if (tiles * split > INT32_MAX) return GM_E_SHAPE;
  if (split == 1 && even && tiles % grid != 0) {
    const int64_t rest = tiles % grid,
                  shared = even == 2          ? rest
                           : tiles < 2 * grid ? tiles
                                              : rest + grid,
                  units = shared * p.groups;
    if (units >= grid) {
      if (scratch == nullptr) return GM_E_ARG;
      p.shared_tiles = int(shared), p.part_groups = int(units / grid), p.longer_parts = int(units % grid);
    }
  }
  const int64_t all = split > 1 || slices > 1               ? tiles * split
                      : p.shared_tiles == 0 && tiles < grid ? tiles
                                                            : grid;
  void* args[] = {&p, &map};
  return shape->kernel.launch(device, stream,
                              {.grid_x = unsigned(all),
                               .block = unsigned(shape->threads),
                               .smem = unsigned(shape->smem),
                               .cluster = unsigned(split),
                               .pdl = pdl != 0},
                              args);
}

#endif
