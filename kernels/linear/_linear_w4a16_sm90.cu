// Weight-only 4-bit linear for Hopper at M <= 16: the kernels of _linear_w4a16_sm90.cuh and their entry point.
#include "_linear_w4a16_sm90.cuh"
#include "gm_cuda.h"

// Shapes of a CTA, the same list as in linear_w4a16_sm90.py: (columns of x in eights, tiles a warp, tiles a slot, warps along N,
// warps along K, slots of x, CTAs a multiprocessor).
#define GM_SHAPES(S)                                                                                                              \
  S(1, 2, 2, 1, 8, 4, 2) S(1, 2, 2, 1, 16, 4, 1) S(1, 4, 4, 1, 8, 4, 2) S(1, 8, 4, 1, 8, 4, 2) S(1, 4, 4, 2, 4, 4, 2)             \
  S(1, 4, 4, 1, 4, 4, 4) S(1, 4, 4, 1, 16, 4, 1) S(1, 4, 4, 1, 12, 4, 1) S(1, 7, 7, 1, 4, 4, 4) S(1, 8, 4, 1, 4, 4, 3)            \
  S(2, 2, 2, 1, 8, 3, 2) S(2, 4, 4, 1, 8, 3, 1) S(2, 7, 7, 2, 4, 3, 1) S(2, 8, 4, 2, 4, 3, 1) S(2, 8, 4, 1, 4, 2, 2)              \
  S(2, 8, 4, 2, 2, 3, 2) S(2, 4, 4, 1, 4, 2, 3)
#define GM_NAME(type, scales, nt, rt, wn, wk) linear_w4_##type##_##scales##_##nt##x##rt##x##wn##x##wk

#ifdef __CUDACC__

#define ONE(T, type, half, scales, nt, rt, c, wn, wk, nx, ctas)                                                                   \
  extern "C" __global__ void __launch_bounds__(wn* wk * 32, ctas)                                                                 \
      GM_NAME(type, scales, nt, rt, wn, wk)(const __grid_constant__ gm::W4Params p) {                                             \
    gm::w4_frag16<T, half, nt, rt, c, wn, wk, nx>(p);                                                                             \
  }
#define S(...)                                                                                                                    \
  ONE(__nv_bfloat16, bf16, false, bf16, __VA_ARGS__)                                                                              \
  ONE(__nv_bfloat16, bf16, true, fp16, __VA_ARGS__)                                                                               \
  ONE(__half, fp16, false, bf16, __VA_ARGS__)                                                                                     \
  ONE(__half, fp16, true, fp16, __VA_ARGS__)
GM_SHAPES(S)
#undef S

#else

namespace {

constexpr int kStaticBytes = 1024;              // of shared memory that the system keeps for a CTA
constexpr int kSharedBytes = 227 * 1024;        // of a multiprocessor

struct Shape {
  int nt, rt, c, wn, wk, nx;
  gm::CudaKernel kernels[4];  // (x, scales): bf16 bf16, bf16 fp16, fp16 bf16, fp16 fp16
};

#define GM_TEXT2(x) #x
#define GM_TEXT(x) GM_TEXT2(x)
#define ONE(type, scales, ...) {GM_CUBIN, GM_TEXT(GM_NAME(type, scales, __VA_ARGS__))}
#define S(nt, rt, c, wn, wk, nx, ctas)                                                                                            \
  {nt, rt, c, wn, wk, nx,                                                                                                         \
   {ONE(bf16, bf16, nt, rt, wn, wk), ONE(bf16, fp16, nt, rt, wn, wk), ONE(fp16, bf16, nt, rt, wn, wk), ONE(fp16, fp16, nt, rt, wn, wk)}},
Shape g_shapes[] = {GM_SHAPES(S)};
#undef S

int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace

// y[M, N] = x[M, K] · Wᵀ (+ bias) (+ residual), all of dtype 1 (fp16) or 2 (bf16); w as w4_frag16_v1 with scales of scale_dtype.
// nt, rt, wn, wk name one of GM_SHAPES; split (1, 2, 4, 8) CTAs share a row block along K; depth slots are kept in flight a warp.
// With device < 0 nothing is launched: the return value is then the dynamic shared memory in bytes, or an error.
GM_CUDA_ENTRY(gm_linear_w4a16_sm90)
(void* y, const void* x, int64_t ldx, const void* w, const void* bias, const void* residual, int m, int n, int k, int dtype,
 int scale_dtype, int nt, int rt, int wn, int wk, int split, int depth, int pdl, int device, void* stream) {
  Shape* shape = nullptr;
  for (Shape& s : g_shapes)
    if (s.nt == nt && s.rt == rt && s.wn == wn && s.wk == wk) shape = &s;
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

  const int warps = wn * wk, sub = ceil_div(rt, shape->c), chunks = ceil_div(ceil_div(p.groups, split), wk) * sub;
  p.depth = (depth < chunks ? depth : chunks) / sub * sub;
  if (p.depth < sub) p.depth = sub;
  if (p.depth > gm::kMaxDepth) p.depth = gm::kMaxDepth / sub * sub;
  const int rings = warps * p.depth * shape->c * gm::kTileBytes + wk * shape->nx * m * gm::kTileK * 2, sums = warps * rt * nt * 512;
  p.inbox = rings > sums ? rings : sums;
  const int smem = p.inbox + (split > 1 ? wn * rt * nt * 512 : 0);
  if (smem + warps * gm::kMaxDepth * 8 + kStaticBytes > kSharedBytes) return GM_E_ARG;
  if (device < 0) return smem;

  gm::CudaKernel& kernel = shape->kernels[(dtype == 1) * 2 + (scale_dtype == 1)];
  const unsigned grid = unsigned(ceil_div(p.tiles, rt * wn) * split);
  void* args[] = {&p};
  return kernel.launch(device, stream,
                       {.grid_x = grid, .block = unsigned(warps * 32), .smem = unsigned(smem), .cluster = unsigned(split), .pdl = pdl != 0},
                       args);
}

#endif
