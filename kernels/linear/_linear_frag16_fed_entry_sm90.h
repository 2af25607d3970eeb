// The shapes of a CTA that linear_fed is compiled for, the kernels of one weight format over them, and their
// entry point.
//
// A source file defines GM_ENTRY (the exported function), GM_TILE_BYTES (of the format's tile) and
// GM_KERNELS(K), a list of K(label, dtype, scale_dtype, T, W, SHAPES) as for _linear_frag16_entry_sm90.h.
// Then it includes this file.
#include "_linear_frag16_fed_sm90.cuh"
#include "gm_cuda.h"

// (columns of x in eights, tiles a warp, warps along N, warps along K), the same lists as in
// frag16_fed_shapes.py.
#define GM_ALL(S, ...)                                                             \
  GM_FEW(S, __VA_ARGS__)                                                           \
  S(__VA_ARGS__, 1, 8, 2, 4) S(__VA_ARGS__, 1, 4, 2, 4) S(__VA_ARGS__, 2, 8, 2, 4) \
      S(__VA_ARGS__, 2, 2, 2, 8)
#define GM_FEW(S, ...)                                                             \
  S(__VA_ARGS__, 1, 7, 2, 4)                                                       \
  S(__VA_ARGS__, 2, 7, 2, 4) S(__VA_ARGS__, 2, 6, 2, 4) S(__VA_ARGS__, 2, 5, 2, 4) \
      S(__VA_ARGS__, 2, 4, 2, 4) S(__VA_ARGS__, 2, 4, 1, 8)

#define GM_JOIN2(a, b, c, d, e) linear_fed_##a##_##b##x##c##x##d##x##e
#define GM_NAME(label, nt, rt, wn, wk) GM_JOIN2(label, nt, rt, wn, wk)

#ifdef __CUDACC__

#define GM_ONE(label, T, W, nt, rt, wn, wk)                                                           \
  extern "C" __global__ void __launch_bounds__(wn * wk * 32 + 128, 1) GM_NAME(label, nt, rt, wn, wk)( \
      const __grid_constant__ gm::W4Params p, const __grid_constant__ CUtensorMap x) {                \
    static_assert(W::kBytes == GM_TILE_BYTES);                                                        \
    gm::linear_fed<T, W, nt, rt, wn, wk>(p, x);                                                       \
  }
#define GM_EACH(label, dtype, scale_dtype, T, W, SHAPES) SHAPES(GM_ONE, label, T, W)
GM_KERNELS(GM_EACH)

#else

namespace {

constexpr int kKeptBytes = 1024;          // of shared memory that the system keeps for a CTA
constexpr int kSharedBytes = 227 * 1024;  // of a multiprocessor

struct Shape {
  int dtype, scale_dtype, nt, rt, wn, wk;
  gm::CudaKernel kernel;
};

#define GM_TEXT2(x) #x
#define GM_TEXT(x) GM_TEXT2(x)
#define GM_ONE(label, dtype, scale_dtype, nt, rt, wn, wk) \
  {dtype, scale_dtype, nt, rt, wn, wk, {GM_CUBIN, GM_TEXT(GM_NAME(label, nt, rt, wn, wk))}},
#define GM_EACH(label, dtype, scale_dtype, T, W, SHAPES) SHAPES(GM_ONE, label, dtype, scale_dtype)
Shape g_shapes[] = {GM_KERNELS(GM_EACH)};

int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace

// y[M, N] = x[M, K] · Wᵀ (times row_scale[N]) (+ bias) (+ residual), all of dtype 1 (fp16) or 2 (bf16); w the
// tiles of a frag16 layout, 16-bit scales of scale_dtype. nt, rt, wn, wk name a shape; split (1, 2, 4, 8)
// CTAs share a row block along K; the ring has `depth` slots, a multiple of wk. x must be 16-byte aligned,
// its rows (ldx elements apart) too. With device < 0 nothing is launched: the return value is then the
// dynamic shared memory in bytes, or an error.
GM_CUDA_ENTRY(GM_ENTRY)
(void* y, const void* x, int64_t ldx, const void* w, const void* bias, const void* residual, int m, int n,
 int k, int dtype, int scale_dtype, int nt, int rt, int wn, int wk, int split, int depth, int pdl, int device,
 void* stream, const void* row_scale) {
  if ((dtype != 1 && dtype != 2) || scale_dtype < 0 || scale_dtype > 2) return GM_E_DTYPE;
  Shape* shape = nullptr;
  for (Shape& s : g_shapes)
    if (s.dtype == dtype && (s.scale_dtype == 0 || s.scale_dtype == scale_dtype) && s.nt == nt &&
        s.rt == rt && s.wn == wn && s.wk == wk)
      shape = &s;
  if (shape == nullptr || (split != 1 && split != 2 && split != 4 && split != 8)) return GM_E_ARG;
  if (depth < wk || depth % wk != 0 || depth > gm::kMaxDepth) return GM_E_ARG;
  if (m < 0 || m > nt * 8 || n < 1 || k < 1 || ldx < k || ldx > INT32_MAX / 64) return GM_E_SHAPE;
  if (ldx % 8 != 0 || reinterpret_cast<uintptr_t>(x) % 16 != 0) return GM_E_SHAPE;

  gm::W4Params p{};
  p.w = static_cast<const uint8_t*>(w), p.x = x, p.y = y, p.bias = bias, p.residual = residual;
  p.row_scale = static_cast<const float*>(row_scale);
  p.m = m, p.n = n, p.k = k, p.ldx = int(ldx);
  p.tiles = ceil_div(n, gm::kTileRows), p.groups = ceil_div(k, gm::kTileK);
  p.log_split = __builtin_ctz(unsigned(split)), p.depth = depth;
  p.scales_half = scale_dtype == 1;

  const int rings = depth * (wn * rt * GM_TILE_BYTES + nt * 8 * gm::kTileK * 2);
  p.inbox = wn * wk * rt * nt * 512;
  const int sums = p.inbox + (split > 1 ? wn * rt * nt * 512 : 0);
  p.bars = rings > sums ? rings : sums;
  const int smem = p.bars + 2 * gm::kMaxDepth * 8;
  if (smem + kKeptBytes > kSharedBytes) return GM_E_ARG;
  if (device < 0) return smem;
  if (m == 0) return GM_OK;

  CUtensorMap map;  // k past the end reads as 0
  const int status = gm::rows_map(&map, x, dtype == 2, uint64_t(k), uint64_t(m), uint64_t(ldx),
                                  gm::kTileK / 2, unsigned(nt * 8));
  if (status != GM_OK) return status;
  const unsigned grid = unsigned(ceil_div(p.tiles, rt * wn) * split);
  void* args[] = {&p, &map};
  return shape->kernel.launch(device, stream,
                              {.grid_x = grid,
                               .block = unsigned(wn * wk * 32 + 128),
                               .smem = unsigned(smem),
                               .cluster = unsigned(split),
                               .pdl = pdl != 0},
                              args);
}

#endif
