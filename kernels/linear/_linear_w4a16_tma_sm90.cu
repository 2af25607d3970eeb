// Weight-only 4-bit linear for Hopper at M > 16: the kernels of _linear_w4a16_tma_sm90.cuh, and their entry.
#include "_linear_w4a16_tma_sm90.cuh"
#include "gm_cuda.h"

// Shapes of a CTA, the same list as in linear_w4a16_tma_sm90.py: (rows of x, blocks of 64 rows of W, CTAs a multiprocessor, slots of x,
// slots of W).
#define GM_SHAPES(S) S(32, 2, 2, 8, 6, 2, 2) S(64, 2, 2, 6, 5, 1, 2) S(128, 2, 1, 8, 6, 1, 1) S(128, 4, 1, 7, 5, 1, 1) S(256, 2, 1, 5, 5, 1, 1)
#define GM_NAME(type, mt, c) linear_w4_tma_##type##_##mt##x##c

#ifdef __CUDACC__

#define GM_KERNEL(name, type, exact, mt, c, ctas, xs, ws, chains, pending)                                                             \
  extern "C" __global__ void __launch_bounds__((c + 1) * 128, ctas)                                                    \
      name(const __grid_constant__ gm::W4TmaParams p, const __grid_constant__ CUtensorMap x) {                        \
    gm::w4_tma<type, exact, mt, c, c == 4 ? 112 : ctas == 2 ? 96 : 232, c == 4 ? 32 : 40, xs, ws, chains, pending>(p, x);                                                                     \
  }
#define S(mt, c, ctas, xs, ws, chains, pending)                                                                                        \
  GM_KERNEL(GM_NAME(bf16, mt, c), __nv_bfloat16, false, mt, c, ctas, xs, ws, chains, pending)                                          \
  GM_KERNEL(GM_NAME(bf16_half, mt, c), __nv_bfloat16, true, mt, c, ctas, xs, ws, chains, pending)                                      \
  GM_KERNEL(GM_NAME(fp16, mt, c), __half, false, mt, c, ctas, xs, ws, chains, pending)
GM_SHAPES(S)
#undef S

#else

namespace {

struct Shape {
  int mt, c, smem;
  gm::CudaKernel bf16, bf16_half, fp16;
};

#define GM_TEXT2(x) #x
#define GM_TEXT(x) GM_TEXT2(x)
#define S(mt, c, ctas, xs, ws, chains, pending)                                                                                        \
  {mt,                                                                                                                \
   c,                                                                                                                 \
   gm::w4_tma_smem(mt, c, xs, ws),                                                                                    \
   {GM_CUBIN, GM_TEXT(GM_NAME(bf16, mt, c))},                                                                         \
   {GM_CUBIN, GM_TEXT(GM_NAME(bf16_half, mt, c))},                                                                    \
   {GM_CUBIN, GM_TEXT(GM_NAME(fp16, mt, c))}},
Shape g_shapes[] = {GM_SHAPES(S)};
#undef S

int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace

// y [m, n] = x [m, k] . W^T + bias + residual; dtype 1 is fp16, 2 bf16, of x and y and of the scales. mt, c name one of GM_SHAPES; split
// CTAs share a tile along K, and without that `grid` CTAs walk over the tiles, `raster` of them along M side by side. With `even` the last
// tiles are dealt out along K: then scratch holds 65536 bytes that are zero, and grid * mt * c * 256 more. x must be
// 16-byte aligned, its rows (ldx elements apart) too. device < 0 asks for the bytes of shared memory.
GM_CUDA_ENTRY(gm_linear_w4a16_tma_sm90)
(void* y, const void* x, int64_t ldx, const void* w, const void* bias, const void* residual, void* scratch, int m, int n, int k, int dtype,
 int scale_dtype, int mt, int c, int split, int grid, int raster, int even, int pdl, int device, void* stream) {
  Shape* shape = nullptr;
  for (Shape& s : g_shapes)
    if (s.mt == mt && s.c == c) shape = &s;
  if (shape == nullptr || grid < 1 || grid > gm::kFlagBytes / (c * 16) || raster < 1) return GM_E_ARG;
  if ((split != 1 && split != 2 && split != 4 && split != 8) || split > mt / 8) return GM_E_ARG;
  if (m < 0 || n < 1 || k < 1 || k % gm::kTileK != 0 || ldx < k || ldx % 8 != 0) return GM_E_SHAPE;
  if ((dtype != 1 && dtype != 2) || (scale_dtype != 1 && scale_dtype != 2)) return GM_E_DTYPE;
  if (reinterpret_cast<uintptr_t>(x) % 16 != 0) return GM_E_SHAPE;
  if (device < 0) return shape->smem;
  if (m == 0) return GM_OK;

  gm::W4TmaParams p{};
  p.w = static_cast<const uint8_t*>(w), p.y = y, p.bias = bias, p.residual = residual;
  p.scratch = static_cast<uint8_t*>(scratch);
  p.m = m, p.n = n, p.groups = k / gm::kTileK, p.tiles16 = ceil_div(n, gm::kTileRows);
  p.n_tiles = ceil_div(n, c * 64), p.m_tiles = ceil_div(m, mt), p.raster = raster;
  p.log_split = __builtin_ctz(unsigned(split)), p.scales_half = scale_dtype == 1;
  p.vector = n % 8 == 0 && reinterpret_cast<uintptr_t>(y) % 16 == 0 && reinterpret_cast<uintptr_t>(residual) % 16 == 0;

  CUtensorMap map;
  const int status = gm::rows_map(&map, x, dtype == 2, uint64_t(k), uint64_t(m), uint64_t(ldx), gm::kXSlotK, unsigned(mt));
  if (status != GM_OK) return status;
  gm::CudaKernel& kernel = dtype == 1 ? shape->fp16 : scale_dtype == 1 ? shape->bf16_half : shape->bf16;
  const int64_t tiles = int64_t(p.n_tiles) * p.m_tiles;
  if (tiles * split > INT32_MAX) return GM_E_SHAPE;
  if (split == 1 && even && tiles % grid != 0) {  // one or two tiles' worth for each CTA; the rest are whole tiles
    p.shared_tiles = int(tiles < 2 * grid ? tiles : tiles % grid + grid);
    if (int64_t(p.shared_tiles) * p.groups >= grid && scratch == nullptr) return GM_E_ARG;
    if (int64_t(p.shared_tiles) * p.groups < grid) p.shared_tiles = 0;
    p.part_groups = int(int64_t(p.shared_tiles) * p.groups / grid), p.longer_parts = int(int64_t(p.shared_tiles) * p.groups % grid);
  }
  const unsigned ctas = unsigned(split > 1 ? tiles * split : p.shared_tiles == 0 && tiles < grid ? tiles : grid);
  void* args[] = {&p, &map};
  return kernel.launch(device, stream,
                       {.grid_x = ctas, .block = unsigned((c + 1) * 128), .smem = unsigned(shape->smem), .cluster = unsigned(split), .pdl = pdl != 0},
                       args);
}

#endif
