// The kernels of one kind of operand and their entry. A source defines GM_ENTRY, GM_NAME (start of kernel
// names), GM_TYPE (E4m3, Int8) and GM_BLOCKS (scales of 128 x 128 blocks), and includes this.
#include "instances.h"
#include "staggered.cuh"

// Rows of operand A and of B, whether A is x (2: and the warpgroups multiply in turns; 3: half a slot apart; 4: and tiles of
// y are staged whole; 5: and CTAs come in pairs; 6: as 4, and the second warpgroup waits once a tile, and W of the next
// tile is fetched), warpgroups, blocks of 64 rows for each, CTAs of a multiprocessor.
#define GM_SHAPES(K)      \
  K(64, 8, 0, 1, 1, 4)    \
  K(64, 16, 0, 1, 1, 4)   \
  K(64, 32, 0, 1, 1, 4)   \
  K(64, 64, 0, 1, 1, 2)   \
  K(128, 16, 0, 2, 1, 2)  \
  K(128, 32, 0, 2, 1, 2)  \
  K(128, 64, 0, 2, 1, 1)  \
  K(128, 128, 1, 2, 1, 1) \
  K(256, 128, 1, 2, 2, 1)
#define GM_TURNS(K)       \
  K(64, 32, 2, 1, 1, 3)   \
  K(64, 64, 2, 1, 1, 2)   \
  K(128, 64, 2, 2, 1, 1)  \
  K(128, 96, 2, 2, 1, 1)  \
  K(128, 128, 2, 2, 1, 1) \
  K(256, 128, 2, 2, 2, 1)
#define GM_STAGGERED(K)   \
  K(256, 128, 3, 2, 2, 1) \
  K(256, 128, 4, 2, 2, 1) \
  K(128, 128, 5, 2, 1, 1) \
  K(256, 128, 6, 2, 2, 1)

#ifdef __CUDACC__

#define GM_ONE(...) GM_W8A8_KERNEL(gm::w8a8::product, gm::w8a8::Params, __VA_ARGS__)
GM_SHAPES(GM_ONE)
#define GM_IN_TURNS(rows, columns, plain, warpgroups, halves, ctas)                       \
  extern "C" __global__ void __launch_bounds__(GM_THREADS(warpgroups, columns), ctas)     \
      GM_NAMED(GM_NAME, rows, columns, plain)(const __grid_constant__ gm::w8a8::Params p, \
                                              const __grid_constant__ CUtensorMap w,      \
                                              const __grid_constant__ CUtensorMap x) {    \
    using Shape = gm::w8a8::Shape<warpgroups, halves, columns, true, GM_BLOCKS>;          \
    gm::w8a8::product_in_turns<gm::w8a8::GM_TYPE, Shape>(p, w, x);                        \
  }
GM_TURNS(GM_IN_TURNS)
#define GM_ONE_STAGGERED(rows, columns, plain, warpgroups, halves, ctas)                     \
  extern "C" __global__ void __launch_bounds__(GM_THREADS(warpgroups, columns), ctas)        \
      GM_NAMED(GM_NAME, rows, columns, plain)(                                               \
          const __grid_constant__ gm::w8a8::Params p, const __grid_constant__ CUtensorMap w, \
          const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap y) {    \
    using Shape = gm::w8a8::Shape<warpgroups, halves, columns, true, GM_BLOCKS>;             \
    using Staggered = gm::w8a8::Staggered<Shape, (plain) == 5, (plain) >= 4, (plain) == 6>;  \
    gm::w8a8::product_staggered<gm::w8a8::GM_TYPE, Staggered>(p, w, x, y);                   \
  }
GM_STAGGERED(GM_ONE_STAGGERED)

#else
#include "args.h"

namespace {

using namespace gm::w8a8;
using gm::ceil_div, gm::is_aligned;
using Args = GmLinearW8a8Args;

// Up to so many tokens, W is read once or little more: by few tiles along m (bytes_map).
constexpr int kReadOnce = 256;

Instance g_instances[] = {GM_SHAPES(GM_W8A8_INSTANCE) GM_TURNS(GM_W8A8_INSTANCE)
                              GM_STAGGERED(GM_W8A8_INSTANCE)};

// Staggered instances have a third barrier for each slot; those in pairs are launched as clusters of two.
bool is_staggered(const Instance& one) { return one.plain >= 3; }
int ctas_of_pair(const Instance& one) { return one.plain == 5 ? 2 : 1; }
// Shared memory of a slot, and of the end of a tile: 64 rows of y are staged for each warpgroup, or all.
int slot_bytes(const Instance& one) { return one.slot_bytes + (is_staggered(one) ? 8 : 0); }
int end_bytes(const Instance& one) {
  if (one.plain < 4) return one.epilogue_bytes;
  const int scales = one.rows / 2 * 8 + one.columns * 8;  // of a warpgroup
  return one.rows * one.columns * 2 + 2 * ((scales + 1023) / 1024 * 1024);
}

}  // namespace

// y [m, n] = scales of x [m, k] . W^T, + bias + residual.
// GM_OK, or an error; with device -1 the bytes of shared memory.
GM_CUDA_ARGS(GM_ENTRY, GmLinearW8a8Args)(const GmLinearW8a8Args* args) {
  const Args& a = *args;
  if ((a.y_type != 1 && a.y_type != 2) || a.w_type < 0 || a.w_type > 2) return GM_E_DTYPE;
  if (a.m < 0 || a.n < 1 || a.k < 1 || a.k % 16 || a.ldx % 16 || a.ldx < a.k) return GM_E_SHAPE;
  Instance* one = find(g_instances, a.rows, a.columns, a.plain);
  if (one == nullptr || a.slots < 2 || a.slots > 32 || a.band < 1 || a.grid < 1) return GM_E_ARG;
  if (a.split != 1 && a.split != 2 && a.split != 4 && a.split != 8) return GM_E_ARG;
  const int k_blocks = ceil_div(a.k, gm::w8a8::kBlockK);
  if (a.split > 1 && (a.plain || a.split > k_blocks)) return GM_E_ARG;
  // Partial sums of a cluster reuse the memory of the rings.
  const int fragments = a.columns / 8, share = fragments > a.split ? fragments / a.split : 1;
  if (a.split > 1 && a.slots * (a.rows + a.columns) * gm::w8a8::kBlockK < a.split * share * a.rows * 32)
    return GM_E_ARG;
  const int pair = ctas_of_pair(*one);
  if (a.grid < pair) return GM_E_ARG;
  const int smem = a.slots * slot_bytes(*one) + end_bytes(*one);
  if (!fits(*one, smem, a.ctas)) return GM_E_ARG;
  if (a.device < 0) return smem;
  if (a.m == 0) return GM_OK;
  if (!is_aligned(a.x) || !is_aligned(a.w)) return GM_E_SHAPE;
  if (GM_BLOCKS && (a.row_block == nullptr || a.x_pitch % 4 || a.x_pitch < a.m || !is_aligned(a.x_scale)))
    return GM_E_ARG;

  gm::w8a8::Params p{};
  p.y = a.y, p.bias = a.bias, p.residual = a.residual;
  p.x_scale = static_cast<const float*>(a.x_scale), p.x_sum = static_cast<const int*>(a.x_sum);
  p.w_scale = a.w_scale, p.w_type = a.w_type, p.row_block = static_cast<const int*>(a.row_block);
  p.m = a.m, p.n = a.n, p.k_blocks = k_blocks;
  p.n_tiles = ceil_div(a.n, one->tile_n() * pair), p.m_tiles = ceil_div(a.m, one->tile_m());
  p.band = a.band < p.m_tiles ? a.band : p.m_tiles;
  p.slots = a.slots, p.log_split = __builtin_ctz(unsigned(a.split)), p.x_pitch = a.x_pitch;
  p.half = a.y_type == 1, p.vector = a.n % 8 == 0 && is_aligned(a.y);
  const int64_t tiles = int64_t(p.n_tiles) * p.m_tiles;
  if ((tiles + a.grid) * a.split > INT32_MAX) return GM_E_SHAPE;

  CUtensorMap maps[3];
  int status = bytes_map(&maps[0], a.w, uint64_t(a.k), uint64_t(a.n), uint64_t(a.k), unsigned(one->tile_n()),
                         a.m <= kReadOnce);
  if (status == GM_OK)
    status = bytes_map(&maps[1], a.x, uint64_t(a.k), uint64_t(a.m), uint64_t(a.ldx),
                       unsigned(one->tile_m() / pair));
  if (status == GM_OK && is_staggered(*one) && p.vector)  // what a warp stores at a time
    status = gm::rows_map(&maps[2], gm::float16_type(!p.half), a.y, uint64_t(a.n), uint64_t(a.m),
                          uint64_t(a.n) * 2, 64, 16);
  if (status != GM_OK) return status;
  void* arguments[] = {&p, &maps[0], &maps[1], &maps[2]};
  const int64_t at_once = a.grid / pair;
  const int64_t ctas = a.split > 1 ? tiles * a.split : (tiles < at_once ? tiles : at_once) * pair;
  return one->kernel.launch(a.device, a.stream,
                            {.grid_x = unsigned(ctas),
                             .block = unsigned(one->threads),
                             .smem = unsigned(smem),
                             .cluster = unsigned(a.split * pair),
                             .pdl = a.pdl != 0},
                            arguments);
}

#endif
