// Weight-only 4-bit linear for Hopper at M <= 64 by warpgroup products: the kernels of _linear_w4a16_wgmma_sm90.cuh, and their entry.
#include "_linear_w4a16_wgmma_sm90.cuh"
#include "gm_cuda.h"

// Shapes of a CTA, the same list as in linear_w4a16_wgmma_sm90.py: (columns of x in eights, blocks of 64 rows a warpgroup, warpgroups
// along N, warpgroups along K, slots of x).
#define GM_SHAPES(S)                                                                                                  \
  S(4, 1, 1, 2, 3) S(4, 2, 1, 2, 3) S(4, 7, 1, 2, 3) S(4, 3, 1, 3, 3) S(4, 1, 1, 4, 3)                                \
  S(8, 1, 1, 2, 3) S(8, 2, 1, 2, 3) S(8, 3, 1, 2, 3) S(8, 1, 2, 1, 3) S(8, 1, 1, 3, 3)
#define GM_NAME(type, nt, rb, wn, wk) linear_w4_wgmma_##type##_##nt##x##rb##x##wn##x##wk

#ifdef __CUDACC__

#define S(nt, rb, wn, wk, nx)                                                                                         \
  extern "C" __global__ void __launch_bounds__(wn* wk * 128, 1)                                                       \
      GM_NAME(bf16, nt, rb, wn, wk)(const __grid_constant__ gm::W4Params p) {                                         \
    gm::w4_wgmma<__nv_bfloat16, nt, rb, wn, wk, nx>(p);                                                               \
  }                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(wn* wk * 128, 1)                                                       \
      GM_NAME(fp16, nt, rb, wn, wk)(const __grid_constant__ gm::W4Params p) {                                         \
    gm::w4_wgmma<__half, nt, rb, wn, wk, nx>(p);                                                                      \
  }
GM_SHAPES(S)
#undef S

#else

namespace {

constexpr int kKeptBytes = 1024;          // of shared memory that the system keeps for a CTA
constexpr int kSharedBytes = 227 * 1024;  // of a multiprocessor

struct Shape {
  int nt, rb, wn, wk, nx;
  gm::CudaKernel bf16, fp16;
};

#define GM_TEXT2(x) #x
#define GM_TEXT(x) GM_TEXT2(x)
#define S(nt, rb, wn, wk, nx)                                                                                         \
  {nt, rb, wn, wk, nx, {GM_CUBIN, GM_TEXT(GM_NAME(bf16, nt, rb, wn, wk))}, {GM_CUBIN, GM_TEXT(GM_NAME(fp16, nt, rb, wn, wk))}},
Shape g_shapes[] = {GM_SHAPES(S)};
#undef S

int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace

// As gm_linear_w4a16_sm90; nt, rb, wn, wk name one of GM_SHAPES, and m is at most 8 nt.
GM_CUDA_ENTRY(gm_linear_w4a16_wgmma_sm90)
(void* y, const void* x, int64_t ldx, const void* w, const void* bias, const void* residual, int m, int n, int k, int dtype,
 int scale_dtype, int nt, int rb, int wn, int wk, int split, int depth, int pdl, int device, void* stream) {
  Shape* shape = nullptr;
  for (Shape& s : g_shapes)
    if (s.nt == nt && s.rb == rb && s.wn == wn && s.wk == wk) shape = &s;
  if (shape == nullptr || depth < 1 || (split != 1 && split != 2 && split != 4 && split != 8)) return GM_E_ARG;
  if (m < 0 || m > nt * 8 || n < 1 || k < 1 || k % gm::kTileK != 0 || ldx < 0 || ldx > INT32_MAX / 64) return GM_E_SHAPE;
  if ((dtype != 1 && dtype != 2) || (scale_dtype != 1 && scale_dtype != 2)) return GM_E_DTYPE;
  if (m == 0) return GM_OK;

  gm::W4Params p{};
  p.w = static_cast<const uint8_t*>(w), p.x = x, p.y = y, p.bias = bias, p.residual = residual;
  p.m = m, p.n = n, p.k = k, p.ldx = int(ldx);
  p.tiles = ceil_div(n, gm::kTileRows), p.groups = k / gm::kTileK;
  p.log_split = __builtin_ctz(unsigned(split));
  p.xaligned = ldx % 8 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
  p.scales_half = scale_dtype == 1;

  const int groups = wn * wk, chunks = ceil_div(ceil_div(p.groups, split), wk) * rb;
  p.depth = depth < chunks ? depth : chunks;
  if (p.depth > gm::kMaxDepth) p.depth = gm::kMaxDepth;
  const int rings = groups * p.depth * 4 * gm::kTileBytes + wk * shape->nx * nt * 8 * gm::kTileK * 2, sums = groups * rb * 4 * nt * 512;
  p.inbox = rings > sums ? rings : sums;
  const int smem = p.inbox + (split > 1 ? wn * rb * 4 * nt * 512 : 0);
  if (smem + groups * gm::kMaxDepth * 16 + 2 * kKeptBytes > kSharedBytes) return GM_E_ARG;
  if (device < 0) return smem;

  gm::CudaKernel& kernel = dtype == 2 ? shape->bf16 : shape->fp16;
  const unsigned grid = unsigned(ceil_div(p.tiles, 4 * rb * wn) * split);
  void* args[] = {&p};
  return kernel.launch(device, stream,
                       {.grid_x = grid, .block = unsigned(groups * 128), .smem = unsigned(smem), .cluster = unsigned(split), .pdl = pdl != 0},
                       args);
}

#endif
