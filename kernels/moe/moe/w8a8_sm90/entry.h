// The kernels of one kind of operand and their entry. A source defines GM_ENTRY, GM_NAME (start of kernel
// names), GM_TYPE (E4m3) and GM_BLOCKS (scales of 128 x 128 blocks), and includes this.
#include "args.h"
#include "gm_cuda.h"
#include "grouped.cuh"

// Rows of operand A and of B, whether A is x, warpgroups,
// blocks of 64 rows for each, CTAs of a multiprocessor.
#define GM_SHAPES(K)      \
  K(64, 8, 0, 1, 1, 4)    \
  K(64, 16, 0, 1, 1, 4)   \
  K(128, 16, 0, 2, 1, 2)  \
  K(128, 32, 0, 2, 1, 2)  \
  K(128, 64, 0, 2, 1, 1)  \
  K(128, 128, 1, 2, 1, 1) \
  K(256, 128, 1, 2, 2, 1)

#define GM_THREADS(warpgroups, columns) ((warpgroups) * 128 + ((columns) == 128 ? 128 : 32))
#define GM_JOIN3(a, b, c, d) a##_##b##x##c##x##d
#define GM_NAMED(a, b, c, d) GM_JOIN3(a, b, c, d)

#ifdef __CUDACC__

#define GM_ONE(rows, columns, plain, warpgroups, halves, ctas)                                          \
  extern "C" __global__ void __launch_bounds__(GM_THREADS(warpgroups, columns), ctas)                   \
      GM_NAMED(GM_NAME, rows, columns, plain)(const __grid_constant__ gm::w8a8::ExpertParams p,         \
                                              const __grid_constant__ CUtensorMap w,                    \
                                              const __grid_constant__ CUtensorMap x) {                  \
    gm::w8a8::grouped_product<gm::w8a8::GM_TYPE,                                                        \
                              gm::w8a8::Shape<warpgroups, halves, columns, plain, GM_BLOCKS>>(p, w, x); \
  }
GM_SHAPES(GM_ONE)

#else

namespace {

using Args = gm_grouped_w8a8_args;

struct Instance {
  int rows, columns, plain, threads, ctas, slot_bytes, end_bytes;
  gm::CudaKernel kernel;
  int tile_n() const { return plain ? columns : rows; }
  int tile_m() const { return plain ? rows : columns; }
};

// A chunk of y, and scales of the warpgroups' rows of A and of B.
constexpr int end_bytes(int rows, int columns, int warpgroups, bool plain) {
  const int tokens = plain ? rows / warpgroups : columns;
  return warpgroups * ((tokens < 64 ? tokens : 64) * 128 + columns * 8) + rows * 8;
}

#define GM_STRING(text) #text
#define GM_TEXT(text) GM_STRING(text)
#define GM_ONE(rows, columns, plain, warpgroups, halves, ctas)                                 \
  {rows,                                                                                       \
   columns,                                                                                    \
   plain,                                                                                      \
   GM_THREADS(warpgroups, columns),                                                            \
   ctas,                                                                                       \
   (rows + columns) * gm::w8a8::kBlockK + (GM_BLOCKS ? (plain ? rows : columns) * 4 : 0) + 16, \
   end_bytes(rows, columns, warpgroups, plain),                                                \
   {GM_CUBIN, GM_TEXT(GM_NAMED(GM_NAME, rows, columns, plain))}},
Instance g_instances[] = {GM_SHAPES(GM_ONE)};

// Shared memory of a CTA: a multiprocessor has 228 KB, and each CTA takes 1 KB of them.
constexpr int kMostShared = 227 * 1024;
constexpr int kMostExperts = 1024;

int ceil_div(int a, int b) { return (a + b - 1) / b; }

// 8-bit values [rows, k], in boxes of `box` rows of 128 bytes in the 128-byte swizzle, zeros past the matrix.
int bytes_map(CUtensorMap* map, const void* base, uint64_t k, uint64_t rows, unsigned box) {
  const gm::CudaDriver* driver = gm::cuda_driver();
  if (driver == nullptr) return GM_E_DRIVER;
  const cuuint64_t sizes[] = {k, rows}, strides[] = {k};
  const cuuint32_t boxes[] = {gm::w8a8::kBlockK, box}, steps[] = {1, 1};
  const CUresult result =
      driver->tensor_map(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(base), sizes, strides,
                         boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                         CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? GM_OK : GM_E_CUDA - int(result);
}

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

}  // namespace

// y[p, :] = scales of x[p, :] . W[expert of p]^T for the rows p of experts. GM_OK, or an error; with device
// -1 the bytes of shared memory.
GM_CUDA_ENTRY(GM_ENTRY)(const gm_grouped_w8a8_args* args) {
  const Args& a = *args;
  if (a.size != int(sizeof a)) return GM_E_ABI;
  if ((a.y_type != 1 && a.y_type != 2) || a.w_type < 0 || a.w_type > 2) return GM_E_DTYPE;
  if (a.rows < 0 || a.n < 1 || a.k < 1 || a.k % 16 || a.experts < 1 || a.experts > kMostExperts ||
      int64_t(a.experts) * a.n > INT32_MAX)
    return GM_E_SHAPE;
  Instance* one = nullptr;
  for (Instance& i : g_instances)
    if (i.rows == a.tile_a && i.columns == a.tile_b && i.plain == a.plain) one = &i;
  if (one == nullptr || a.slots < 2 || a.slots > 32 || a.grid < 1) return GM_E_ARG;
  const int smem = a.slots * one->slot_bytes + one->end_bytes + 8 * (a.experts + 1);
  if (a.ctas < 1 || a.ctas > one->ctas || smem > kMostShared || (smem + 1024) * a.ctas > kMostShared + 1024)
    return GM_E_ARG;
  if (a.device < 0) return smem;
  if (a.rows == 0) return GM_OK;
  if (!is_aligned(a.x) || !is_aligned(a.w)) return GM_E_SHAPE;
  if (a.offsets == nullptr || a.x_scale == nullptr) return GM_E_ARG;
  if (GM_BLOCKS && (a.row_block == nullptr || a.block_rows < 1 || a.x_pitch % 4 || !is_aligned(a.x_scale) ||
                    a.x_pitch < gm::w8a8::scale_pitch(a.rows, a.experts)))
    return GM_E_ARG;

  const int k_blocks = ceil_div(a.k, gm::w8a8::kBlockK);
  gm::w8a8::ExpertParams g{};
  gm::w8a8::Params& p = g.one;
  p.y = a.y, p.x_scale = static_cast<const float*>(a.x_scale);
  p.w_scale = a.w_scale, p.w_type = a.w_type, p.row_block = static_cast<const int*>(a.row_block);
  p.n = a.n, p.k_blocks = k_blocks, p.slots = a.slots, p.x_pitch = a.x_pitch;
  p.half = a.y_type == 1, p.vector = a.n % 8 == 0 && is_aligned(a.y);
  g.expert_scales = int64_t(GM_BLOCKS ? a.block_rows * k_blocks : a.n) * (a.w_type == 0 ? 4 : 2);
  g.list.offsets = a.offsets, g.list.experts = a.experts, g.list.rows = a.rows;
  g.list.blocks = ceil_div(a.n, one->tile_n()), g.list.by_blocks = gm::reciprocal(g.list.blocks);
  // Each expert has at most one tile that is not full.
  const int64_t high = int64_t(ceil_div(a.rows, one->tile_m())) + a.experts;
  const int64_t tiles = (high < a.rows ? high : a.rows) * g.list.blocks;
  if (tiles + a.grid > INT32_MAX) return GM_E_SHAPE;

  CUtensorMap maps[2];
  int status = bytes_map(&maps[0], a.w, uint64_t(a.k), uint64_t(a.experts) * a.n, unsigned(one->tile_n()));
  if (status == GM_OK)
    status = bytes_map(&maps[1], a.x, uint64_t(a.k), uint64_t(a.rows), unsigned(one->tile_m()));
  if (status != GM_OK) return status;
  void* arguments[] = {&g, &maps[0], &maps[1]};
  return one->kernel.launch(a.device, a.stream,
                            {.grid_x = unsigned(tiles < a.grid ? tiles : a.grid),
                             .block = unsigned(one->threads),
                             .smem = unsigned(smem),
                             .pdl = a.pdl != 0},
                            arguments);
}

#endif
