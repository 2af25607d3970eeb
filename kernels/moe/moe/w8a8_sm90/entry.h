// The kernels of one kind of operand and their entry. A source defines GM_ENTRY, GM_NAME (start of kernel
// names), GM_TYPE (E4m3) and GM_BLOCKS (scales of 128 x 128 blocks), and includes this.
#include "grouped.cuh"
#include "linear/w8a8_sm90/instances.h"

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

#ifdef __CUDACC__

#define GM_ONE(...) GM_W8A8_KERNEL(gm::w8a8::grouped_product, gm::w8a8::ExpertParams, __VA_ARGS__)
GM_SHAPES(GM_ONE)

#else
#include "args.h"
#include "moe/expert_grid.h"

namespace {

using namespace gm::w8a8;
using gm::ceil_div, gm::is_aligned;
using Args = GmGroupedW8a8Args;

Instance g_instances[] = {GM_SHAPES(GM_W8A8_INSTANCE)};

constexpr int kMaxExperts = 1024;

}  // namespace

// y[p, :] = scales of x[p, :] . W[expert of p]^T for the rows p of experts. GM_OK, or an error; with device
// -1 the bytes of shared memory.
GM_CUDA_ARGS(GM_ENTRY, GmGroupedW8a8Args)(const GmGroupedW8a8Args* args) {
  const Args& a = *args;
  if ((a.y_type != 1 && a.y_type != 2) || a.w_type < 0 || a.w_type > 2) return GM_E_DTYPE;
  if (a.rows < 0 || a.n < 1 || a.k < 1 || a.k % 16 || a.experts < 1 || a.experts > kMaxExperts ||
      int64_t(a.experts) * a.n > INT32_MAX)
    return GM_E_SHAPE;
  Instance* one = find(g_instances, a.tile_a, a.tile_b, a.plain);
  if (one == nullptr || a.slots < 2 || a.slots > 32 || a.grid < 1) return GM_E_ARG;
  const int smem = a.slots * one->slot_bytes + one->epilogue_bytes + 8 * (a.experts + 1);
  if (!fits(*one, smem, a.ctas)) return GM_E_ARG;
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
  const int64_t tiles = gm::most_expert_tiles(a.rows, a.experts, one->tile_m(), g.list.blocks);
  if (tiles + a.grid > INT32_MAX) return GM_E_SHAPE;

  CUtensorMap maps[2];
  int status = bytes_map(&maps[0], a.w, uint64_t(a.k), uint64_t(a.experts) * a.n, uint64_t(a.k),
                         unsigned(one->tile_n()), a.rows <= int64_t(a.experts) * 64);
  if (status == GM_OK)
    status =
        bytes_map(&maps[1], a.x, uint64_t(a.k), uint64_t(a.rows), uint64_t(a.k), unsigned(one->tile_m()));
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
