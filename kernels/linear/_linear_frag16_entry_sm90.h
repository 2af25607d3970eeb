// The shapes of a CTA that linear_frag16 is compiled for, the kernels of one weight format over them, and
// their entry point.
//
// A source file defines GM_ENTRY (the exported function), GM_TILE_BYTES (of the format's tile) and
// GM_KERNELS(K), a list of K(label, dtype, scale_dtype, T, W, SHAPES): T and W are the template arguments,
// dtype 1 (fp16) or 2 (bf16) that of x, scale_dtype that of 16-bit scales (0: any), SHAPES one of the two
// lists below. Then it includes this file.
#include "_linear_w4a16_sm90.cuh"
#include "gm_cuda.h"

// (columns of x in eights, tiles a warp, tiles a slot, warps, slots of x, CTAs a multiprocessor), the same
// lists as in frag16_shapes.py.
#define GM_ALL(S, ...)                                                                                \
  GM_FEW(S, __VA_ARGS__)                                                                              \
  S(__VA_ARGS__, 1, 4, 4, 12, 4, 1) S(__VA_ARGS__, 1, 8, 4, 8, 4, 2) S(__VA_ARGS__, 1, 2, 2, 8, 4, 2) \
      S(__VA_ARGS__, 1, 4, 4, 16, 4, 1) S(__VA_ARGS__, 2, 2, 2, 16, 2, 1)
#define GM_FEW(S, ...)                                                                                \
  S(__VA_ARGS__, 1, 4, 4, 8, 4, 2)                                                                    \
  S(__VA_ARGS__, 1, 4, 4, 4, 4, 4) S(__VA_ARGS__, 1, 2, 2, 16, 4, 1) S(__VA_ARGS__, 1, 8, 4, 4, 4, 4) \
      S(__VA_ARGS__, 2, 2, 2, 8, 3, 2)

#define GM_JOIN2(a, b, c, d) linear_##a##_##b##x##c##x##d
#define GM_NAME(label, nt, rt, wk) GM_JOIN2(label, nt, rt, wk)

#ifdef __CUDACC__

#define GM_ONE(label, T, W, nt, rt, c, wk, nx, ctas)                            \
  extern "C" __global__ void __launch_bounds__(wk * 32, gm::roomy<W, nt>(ctas)) \
      GM_NAME(label, nt, rt, wk)(const __grid_constant__ gm::W4Params p) {      \
    static_assert(W::kBytes == GM_TILE_BYTES);                                  \
    gm::linear_frag16<T, W, nt, rt, c, wk, nx>(p);                              \
  }
#define GM_EACH(label, dtype, scale_dtype, T, W, SHAPES) SHAPES(GM_ONE, label, T, W)
GM_KERNELS(GM_EACH)

#else

namespace {

constexpr int kStaticBytes = 1024;        // of shared memory that the system keeps for a CTA
constexpr int kSharedBytes = 227 * 1024;  // of a multiprocessor

struct Shape {
  int dtype, scale_dtype, nt, rt, c, wk, nx;
  gm::CudaKernel kernel;
};

#define GM_TEXT2(x) #x
#define GM_TEXT(x) GM_TEXT2(x)
#define GM_ONE(label, dtype, scale_dtype, nt, rt, c, wk, nx, ctas) \
  {dtype, scale_dtype, nt, rt, c, wk, nx, {GM_CUBIN, GM_TEXT(GM_NAME(label, nt, rt, wk))}},
#define GM_EACH(label, dtype, scale_dtype, T, W, SHAPES) SHAPES(GM_ONE, label, dtype, scale_dtype)
Shape g_shapes[] = {GM_KERNELS(GM_EACH)};

int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace

// y[M, N] = x[M, K] · Wᵀ (times row_scale[N]) (+ bias) (+ residual), all of dtype 1 (fp16) or 2 (bf16); w the
// tiles of a frag16 layout, 16-bit scales of scale_dtype. nt, rt, wk name a shape; split (1, 2, 4, 8) CTAs
// share a row block along K; depth slots are kept in flight a warp. With device < 0 nothing is launched: the
// return value is then the dynamic shared memory in bytes, or an error.
GM_CUDA_ENTRY(GM_ENTRY)
(void* y, const void* x, int64_t ldx, const void* w, const void* bias, const void* residual, int m, int n,
 int k, int dtype, int scale_dtype, int nt, int rt, int wk, int split, int depth, int pdl, int device,
 void* stream, const void* row_scale) {
  if ((dtype != 1 && dtype != 2) || scale_dtype < 0 || scale_dtype > 2) return GM_E_DTYPE;
  Shape* shape = nullptr;
  for (Shape& s : g_shapes)
    if (s.dtype == dtype && (s.scale_dtype == 0 || s.scale_dtype == scale_dtype) && s.nt == nt &&
        s.rt == rt && s.wk == wk)
      shape = &s;
  if (shape == nullptr || depth < 1 || (split != 1 && split != 2 && split != 4 && split != 8))
    return GM_E_ARG;
  if (m < 0 || m > nt * 8 || n < 1 || k < 1 || ldx < 0 || ldx > INT32_MAX / 64) return GM_E_SHAPE;
  if (m == 0) return GM_OK;

  gm::W4Params p{};
  p.w = static_cast<const uint8_t*>(w), p.x = x, p.y = y, p.bias = bias, p.residual = residual;
  p.row_scale = static_cast<const float*>(row_scale);
  p.m = m, p.n = n, p.k = k, p.ldx = int(ldx);
  p.tiles = ceil_div(n, gm::kTileRows), p.groups = ceil_div(k, gm::kTileK);
  p.log_split = __builtin_ctz(unsigned(split));
  p.xaligned = ldx % 8 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
  p.scales_half = scale_dtype == 1;

  const int sub = rt / shape->c, chunks = ceil_div(ceil_div(p.groups, split), wk) * sub;
  p.depth = (depth < chunks ? depth : chunks) / sub * sub;
  if (p.depth < sub) p.depth = sub;
  if (p.depth > gm::kMaxDepth) p.depth = gm::kMaxDepth / sub * sub;
  const int rings = wk * (p.depth * shape->c * GM_TILE_BYTES + shape->nx * m * gm::kTileK * 2);
  p.inbox = wk * rt * nt * 512;
  const int sums = p.inbox + (split > 1 ? rt * nt * 512 : 0), smem = rings > sums ? rings : sums;
  if (smem + wk * gm::kMaxDepth * 8 + kStaticBytes > kSharedBytes) return GM_E_ARG;
  if (device < 0) return smem;

  const unsigned grid = unsigned(ceil_div(p.tiles, rt) * split);
  void* args[] = {&p};
  return shape->kernel.launch(device, stream,
                              {.grid_x = grid,
                               .block = unsigned(wk * 32),
                               .smem = unsigned(smem),
                               .cluster = unsigned(split),
                               .pdl = pdl != 0},
                              args);
}

#endif
