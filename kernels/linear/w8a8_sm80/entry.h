// The kernels of product.cuh for one kind of operand, and their entry. A source defines GM_ENTRY, GM_NAME (start of kernel
// names), GM_TYPE (of int8.cuh or fp8.cuh), GM_BLOCKS (whether scales are of blocks), GM_SHAPES(K) with K(rows of x, warps,
// columns of a slot, slots, CTAs per multiprocessor) for each instance (shapes.py has the same), and includes this.
#include "gm_cuda.h"
#include "params.h"

#define GM_JOIN_(a, b) a##_##b
#define GM_JOIN(a, b) GM_JOIN_(a, b)

#ifdef __CUDACC__

#define GM_KERNEL(mt, warps, kb, slots, ctas)                                      \
  extern "C" __global__ void __launch_bounds__(warps * 32, ctas)                   \
      GM_JOIN(GM_NAME, mt##x##warps)(const __grid_constant__ gm::w8a8::Params p) { \
    extern __shared__ __align__(128) uint8_t smem[];                               \
    gm::w8a8::Product<gm::w8a8::GM_TYPE, mt, warps, kb, slots>(p, smem).run();     \
  }
GM_SHAPES(GM_KERNEL)

#else  // host
#include "args.h"
#include "sm80/stream_k.cuh"

namespace {

using Args = GmLinearW8a8Sm80Args;

struct Instance {
  int mt, warps, kb, slots;
  gm::CudaKernel kernel;
};
#define GM_TEXT_(name) #name
#define GM_TEXT(name) GM_TEXT_(name)
#define GM_INSTANCE(mt, warps, kb, slots, ctas) \
  {mt, warps, kb, slots, {GM_CUBIN, GM_TEXT(GM_JOIN(GM_NAME, mt##x##warps))}},
Instance g_instances[] = {GM_SHAPES(GM_INSTANCE)};

Instance* find(const Args& a) {
  for (Instance& one : g_instances)
    if (one.mt == a.mt && one.warps == a.warps) return &one;
  return nullptr;
}

}  // namespace

// y [m, n] = scales of x and of W times x [m, k] . W^T, + bias + residual.
// GM_OK, or an error; with a negative device the bytes of shared memory.
GM_CUDA_ARGS(GM_ENTRY, GmLinearW8a8Sm80Args)(const GmLinearW8a8Sm80Args* args) {
  const Args& a = *args;
  if ((a.y_type != 1 && a.y_type != 2) || a.w_type < 0 || a.w_type > 2) return GM_E_DTYPE;
  if (a.m < 0 || a.n < 1 || a.k < 16 || a.k % 16 || a.k > 1 << 16) return GM_E_SHAPE;
  Instance* one = find(a);
  if (one == nullptr || a.grid < 1) return GM_E_ARG;
  const int rows = one->warps * gm::w8a8::kWarpRows;
  const int smem = one->slots * (one->mt + rows) * (one->kb + (GM_BLOCKS ? 4 : 0));
  gm::w8a8::Params p{};
  p.y = a.y, p.bias = a.bias, p.residual = a.residual;
  p.x = static_cast<const uint8_t*>(a.x), p.w = static_cast<const uint8_t*>(a.w);
  p.x_scale = static_cast<const float*>(a.x_scale), p.w_scale = a.w_scale, p.w_type = a.w_type;
  p.row_block = static_cast<const int*>(a.row_block), p.x_step = a.x_step, p.x_pitch = a.x_pitch;
  p.counters = a.counters, p.sums = a.sums, p.ldx = a.ldx, p.m = a.m, p.n = a.n, p.k = a.k;
  p.groups = gm::ceil_div(a.k, one->kb), p.k_blocks = gm::ceil_div(a.k, gm::w8a8::kBlock);
  if (!gm::deal_tiles(p, a, one->mt, rows)) return GM_E_SHAPE;
  p.half = a.y_type == 1;
  p.vectors = a.n % 8 == 0 && gm::is_aligned(a.y) && gm::is_aligned(a.residual);
  if (a.device < 0) return smem;
  if (a.m == 0) return GM_OK;
  if (a.ldx % 16 || a.ldx < a.k || !gm::is_aligned(a.x) || !gm::is_aligned(a.w)) return GM_E_ARG;
  if (GM_BLOCKS && (a.row_block == nullptr || a.x_pitch % 4 || a.x_pitch < a.m || !gm::is_aligned(a.x_scale)))
    return GM_E_ARG;
  return gm::launch_tiles(one->kernel, p, a, one->warps, smem);
}

#endif
