// Dense products of a few dozen rows of x in fp16 and bf16 (product.cuh): the kernels and their entry.
#include "gm_cuda.h"
#include "product.cuh"

// K(type's name, type, rows of x, rows of W)
#define GM_WIDTH(K, NAME, T, width) \
  K(NAME, T, width, 64)             \
  K(NAME, T, width, 128)            \
  K(NAME, T, width, 192)            \
  K(NAME, T, width, 256)
#define GM_SHAPES(K, NAME, T) \
  GM_WIDTH(K, NAME, T, 16)    \
  GM_WIDTH(K, NAME, T, 32)    \
  GM_WIDTH(K, NAME, T, 64)    \
  GM_WIDTH(K, NAME, T, 128)

#ifdef __CUDACC__

#define GM_KERNEL(NAME, T, width, rows)                                                     \
  extern "C" __global__ void __launch_bounds__(gm::dense_mid::Shape<width, rows>::kThreads, \
                                               gm::dense_mid::Shape<width, rows>::kCtas)    \
      dense_mid_##NAME##_##width##x##rows(const __grid_constant__ gm::dense_mid::Params p,  \
                                          const __grid_constant__ CUtensorMap w,            \
                                          const __grid_constant__ CUtensorMap x) {          \
    extern __shared__ __align__(1024) uint8_t smem[];                                       \
    gm::dense_mid::product<T, gm::dense_mid::Shape<width, rows>>(p, w, x, smem);            \
  }
GM_SHAPES(GM_KERNEL, fp16, __half)
GM_SHAPES(GM_KERNEL, bf16, __nv_bfloat16)

#else  // host
#include "args.h"

namespace {

using Args = GmLinearDenseMidArgs;

struct Instance {
  int width, rows, threads;
  int (*slots)(int ctas);
  int (*smem)(int slots);
  gm::CudaKernel kernels[2];  // of fp16 and bf16
};
#define GM_INSTANCE(NAME, T, width, rows)       \
  {width,                                       \
   rows,                                        \
   gm::dense_mid::Shape<width, rows>::kThreads, \
   gm::dense_mid::Shape<width, rows>::slots,    \
   gm::dense_mid::Shape<width, rows>::smem,     \
   {{GM_CUBIN, "dense_mid_fp16_" #width "x" #rows}, {GM_CUBIN, "dense_mid_bf16_" #width "x" #rows}}},
Instance g_instances[] = {GM_SHAPES(GM_INSTANCE, , )};

// W [n, k], or with silu_mul its halves, to TMA in boxes of `rows` rows, of which there one half is gate and the other up.
int weight_map(CUtensorMap* map, const Args& a, int rows) {
  const cuuint64_t halves = a.silu_mul ? 2 : 1, k = cuuint64_t(a.k), n = cuuint64_t(a.n) / halves;
  const cuuint64_t sizes[] = {k, n, halves}, strides[] = {k * 2, n * k * 2};
  const cuuint32_t box[] = {gm::dense_mid::kStep, cuuint32_t(rows / int(halves)), cuuint32_t(halves)};
  return gm::tensor_map(map, gm::float16_type(a.type == 2), 3, a.w, sizes, strides, box,
                        CU_TENSOR_MAP_L2_PROMOTION_L2_128B);  // W passes through L2 once
}

bool is_aligned_to_8(const void* p) { return reinterpret_cast<uintptr_t>(p) % 8 == 0; }

int run(const Args& a, Instance& one) {
  const int slots = one.slots(a.ctas), smem = one.smem(slots);
  if (slots < 2 || smem > gm::dense_mid::kMostShared * 1024) return GM_E_ARG;
  if (a.device < 0) return smem;
  if (a.m == 0) return GM_OK;
  gm::dense_mid::Params p{};
  p.y = a.y, p.bias = a.bias, p.residual = a.residual;
  p.m = a.m, p.n = a.n, p.out_n = a.silu_mul ? a.n / 2 : a.n;
  p.steps = gm::ceil_div(a.k, gm::dense_mid::kStep);
  p.slots = slots, p.split = a.split, p.gated = a.silu_mul != 0;
  p.vectors =
      p.out_n % 4 == 0 && is_aligned_to_8(a.y) && is_aligned_to_8(a.bias) && is_aligned_to_8(a.residual);
  const int64_t ctas = int64_t(gm::ceil_div(p.out_n, p.gated ? one.rows / 2 : one.rows)) * a.split;
  if (ctas > INT32_MAX) return GM_E_SHAPE;

  CUtensorMap maps[2] = {};
  int status = weight_map(&maps[0], a, one.rows);
  if (status == GM_OK)
    status = gm::rows_map(&maps[1], gm::float16_type(a.type == 2), a.x, uint64_t(a.k), uint64_t(a.m),
                          uint64_t(a.ldx) * 2, gm::dense_mid::kStep, unsigned(one.width));
  if (status != GM_OK) return status;
  gm::Launch launch;
  launch.grid_x = unsigned(ctas), launch.block = unsigned(one.threads), launch.smem = unsigned(smem);
  launch.cluster = unsigned(a.split), launch.pdl = a.pdl != 0;
  void* arguments[] = {&p, &maps[0], &maps[1]};
  return one.kernels[a.type - 1].launch(a.device, a.stream, launch, arguments);
}

}  // namespace

// y = x . W^T + bias (gated) + residual. Returns GM_OK, or an error.
GM_CUDA_ARGS(gm_dense_mid_sm90, GmLinearDenseMidArgs)(const GmLinearDenseMidArgs* args) {
  const GmLinearDenseMidArgs& a = *args;
  if (a.type != 1 && a.type != 2) return GM_E_DTYPE;
  if (a.m < 0 || a.m > gm::dense_mid::kMostRows || a.n < 1 || a.k < 8 || a.k % 8 || (a.silu_mul && a.n % 2))
    return GM_E_SHAPE;
  if (a.ldx % 8 || a.ldx < a.k || !gm::is_aligned(a.x) || !gm::is_aligned(a.w)) return GM_E_SHAPE;
  if (a.ctas < 1 || a.ctas > 4 || a.split < 1 || a.split > gm::dense_mid::kMostSplit) return GM_E_ARG;
  for (Instance& one : g_instances)  // the narrowest comes first
    if (one.width >= a.m && one.rows == a.rows) return run(a, one);
  return GM_E_ARG;
}

#endif
