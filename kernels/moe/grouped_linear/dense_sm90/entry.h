// The kernels of one type and their entry point. A source defines
//   GM_ENTRY       the exported function, gm_grouped_dense_<type>_sm90
//   GM_NAME(rest)  the name of a kernel, experts_<type>_<rest>
//   GM_TYPE        of x, W and y; GM_BF16: whether it is bf16
// and includes this file: nvcc reads the kernels, the host compiler the entry.
#pragma once
#include "gm_cuda.h"
#include "product.cuh"

// K(rows of x; blocks of W of a warpgroup, warpgroups with blocks of their own, and those that take turns along K for each; CTAs
// of a cluster, and per multiprocessor; slots; rows of y that a warpgroup stages; widths)
#define GM_SHAPES(K)                                                \
  K(8, 1, 1, 4, 1, 1, 16, 16, 8)                                    \
  K(8, 1, 2, 2, 1, 1, 10, 16, 8)                                    \
  K(16, 1, 2, 1, 1, 2, 5, 16, 8, 16)                                \
  K(32, 1, 2, 1, 1, 2, 4, 32, 8, 16, 32)                            \
  K(64, 1, 2, 1, 1, 2, 4, 16, 16, 32, 64)                           \
  K(64, 2, 2, 1, 1, 1, 5, 32, 16, 32, 64)                           \
  K(128, 1, 2, 1, 1, 1, 6, 32, 32, 64, 80, 96, 128)                 \
  K(128, 2, 2, 1, 1, 1, 4, 32, 32, 64, 80, 96, 128)                 \
  K(160, 2, 2, 1, 1, 1, 4, 32, 32, 64, 96, 128, 160)                \
  K(160, 2, 2, 1, 2, 1, 4, 32, 32, 64, 96, 128, 160)                \
  K(256, 1, 2, 1, 1, 1, 4, 32, 32, 64, 96, 128, 160, 192, 224, 256) \
  K(256, 1, 2, 1, 2, 1, 4, 32, 32, 64, 96, 128, 160, 192, 224, 256)

#define GM_SHAPE(mt, blocks, groups, slices, cluster, ctas, slots, staged, ...) \
  gm::dense::Shape<mt, blocks, groups, slices, cluster, ctas, slots, staged, gm::dense::Widths<__VA_ARGS__>>

#ifdef __CUDACC__

#define GM_KERNEL(mt, blocks, groups, slices, cluster, ctas, ...)                                           \
  extern "C" __global__ void __launch_bounds__((groups * slices + 1) * 128, ctas)                           \
      GM_NAME(mt##x##blocks##x##groups##x##slices##x##cluster)(const __grid_constant__ gm::dense::Params p, \
                                                               const __grid_constant__ CUtensorMap w,       \
                                                               const __grid_constant__ CUtensorMap x) {     \
    extern __shared__ __align__(1024) uint8_t smem[];                                                       \
    gm::dense::product<GM_TYPE, GM_SHAPE(mt, blocks, groups, slices, cluster, ctas, __VA_ARGS__)>(p, w, x,  \
                                                                                                  smem);    \
  }
GM_SHAPES(GM_KERNEL)

#else  // host
#include "args.h"
#include "moe/expert_grid.h"

namespace {

using Args = GmGroupedDenseArgs;

constexpr int kMaxExperts = 1024, kMostShared = 232448;  // bytes of a CTA

struct Instance {
  int mt, blocks, groups, slices, cluster, ctas, slots, box, threads;
  int smem;  // without the experts
  gm::CudaKernel kernel;
  bool is(const Args& a) const {
    return mt == a.mt && blocks == a.blocks && groups == a.groups && slices == a.slices &&
           cluster == a.cluster;
  }
};
#define GM_TEXT_OF(name) #name
#define GM_TEXT(name) GM_TEXT_OF(name)
#define GM_INSTANCE(mt, blocks, groups, slices, cluster, ctas, slots, ...)            \
  {mt,                                                                                \
   blocks,                                                                            \
   groups,                                                                            \
   slices,                                                                            \
   cluster,                                                                           \
   ctas,                                                                              \
   slots,                                                                             \
   GM_SHAPE(mt, blocks, groups, slices, cluster, ctas, slots, __VA_ARGS__)::kBox,     \
   GM_SHAPE(mt, blocks, groups, slices, cluster, ctas, slots, __VA_ARGS__)::kThreads, \
   GM_SHAPE(mt, blocks, groups, slices, cluster, ctas, slots, __VA_ARGS__)::smem(-1), \
   {GM_CUBIN, GM_TEXT(GM_NAME(mt##x##blocks##x##groups##x##slices##x##cluster))}},
Instance g_instances[] = {GM_SHAPES(GM_INSTANCE)};

using gm::ceil_div, gm::is_aligned;

// W [experts, n, k] to TMA, in boxes of `rows` rows of one expert. With silu_mul eight rows of gate and the same eight of
// up alternate. Rows past an expert's are zeros. streams: W passes through the L2 cache about once.
int weight_map(CUtensorMap* map, const Args& a, bool streams) {
  const auto type = gm::float16_type(GM_BF16);
  const auto fetch = streams ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
  const cuuint64_t k = cuuint64_t(a.k), n = cuuint64_t(a.n), row = k * 2, experts = cuuint64_t(a.experts);
  if (!a.silu_mul) {
    const cuuint64_t sizes[] = {k, n, experts}, strides[] = {row, n * row};
    const cuuint32_t box[] = {gm::dense::kStep, cuuint32_t(a.w_rows), 1};
    return gm::tensor_map(map, type, 3, a.w, sizes, strides, box, fetch);
  }
  const cuuint64_t sizes[] = {k, 8, 2, n / 16, experts}, strides[] = {row, n / 2 * row, 8 * row, n * row};
  const cuuint32_t box[] = {gm::dense::kStep, 8, 2, cuuint32_t(a.w_rows / 16), 1};
  return gm::tensor_map(map, type, 5, a.w, sizes, strides, box, fetch);
}

int run(const Args& a, Instance& one) {
  if (a.grid < one.cluster || a.offsets == nullptr) return GM_E_ARG;
  if (a.rows < 0 || a.x_rows < 0 || a.experts < 1 || a.experts > kMaxExperts || a.n < 1 || a.k < 1)
    return GM_E_SHAPE;
  // TMA and 16-byte stores.
  if (a.k % 8 || a.ldx % 8 || a.ldx < a.k || a.n % (a.silu_mul ? 16 : 8)) return GM_E_SHAPE;
  if (!is_aligned(a.x) || !is_aligned(a.w) || !is_aligned(a.y)) return GM_E_SHAPE;
  if (a.w_rows < 16 || a.w_rows > gm::dense::kBlockRows || a.w_rows % 16 || a.lag < 0 || a.lag >= one.slots)
    return GM_E_ARG;
  gm::dense::Params p{};
  p.steps = ceil_div(a.k, gm::dense::kStep);
  if (p.steps < one.slices) return GM_E_ARG;
  const int smem = one.smem + 8 * (a.experts + 1);
  if (smem > kMostShared) return GM_E_ARG;
  if (a.device < 0) return smem;
  if (a.rows == 0) return GM_OK;
  if (a.x_rows == 0) return GM_E_SHAPE;

  p.y = a.y, p.bias = a.bias, p.n = a.n, p.rows = a.rows;
  p.gated = a.silu_mul != 0, p.out_n = p.gated ? a.n / 2 : a.n;
  p.clamp = a.clamp, p.alpha = a.alpha, p.limit = a.limit;
  p.next_index = p.steps % one.slots, p.next_parity = p.steps / one.slots & 1;
  p.w_rows = a.w_rows, p.lag = a.lag, p.early = a.early, p.clear = a.clear;
  p.list.offsets = a.offsets, p.list.experts = a.experts, p.list.rows = a.rows;
  p.list.blocks =
      ceil_div(p.out_n, one.cluster * one.blocks * one.groups * (p.gated ? a.w_rows / 2 : a.w_rows));
  p.list.by_blocks = gm::reciprocal(p.list.blocks);
  const int64_t tiles = gm::most_expert_tiles(a.rows, a.experts, one.mt, p.list.blocks);
  if (tiles + a.grid > INT32_MAX) return GM_E_SHAPE;

  CUtensorMap maps[2] = {};
  int status = weight_map(&maps[0], a, a.rows <= int64_t(a.experts) * one.mt);
  if (status == GM_OK)
    status = gm::rows_map(&maps[1], gm::float16_type(GM_BF16), a.x, uint64_t(a.k), uint64_t(a.x_rows),
                          uint64_t(a.ldx) * 2, gm::dense::kStep, unsigned(one.box));
  if (status != GM_OK) return status;
  gm::Launch launch;
  const int64_t clusters = a.grid / one.cluster;
  launch.grid_x = unsigned(tiles < clusters ? tiles : clusters) * unsigned(one.cluster);
  launch.cluster = unsigned(one.cluster);
  launch.block = unsigned(one.threads), launch.smem = unsigned(smem), launch.pdl = a.pdl != 0;
  void* arguments[] = {&p, &maps[0], &maps[1]};
  return one.kernel.launch(a.device, a.stream, launch, arguments);
}

}  // namespace

// y[p, :] = x[p, :] . W[expert of p]^T, or the activation of it. Returns GM_OK, or an error.
GM_CUDA_ARGS(GM_ENTRY, GmGroupedDenseArgs)(const GmGroupedDenseArgs* args) {
  for (Instance& one : g_instances)
    if (one.is(*args)) return run(*args, one);
  return GM_E_ARG;
}

#endif
