// The kernels for any batch of one source, and what their entry point does.
//
// A source _paged_flash_<which>_rare_sm80.cu defines
//   GM_FLASH    the device function of a kernel
//   GM_EACH(K)  K(first part of the kernels' names, type of q and out, its code, C++ type, elements of the heads of a tile) ...
// and includes this file, whose `run_flash` its entry calls: nvcc reads the kernels, the host compiler the entry.
#pragma once
#include "flash_codes.cuh"
#include "gm_cuda.h"
#include "attention/paged_attention/sm90/_paged_decode_host_sm90.h"

#ifdef __CUDACC__

extern __shared__ __align__(128) uint8_t flash_smem[];

#define GM_ONE(name, type, code, T, d)                                                            \
  extern "C" __global__ void __launch_bounds__(128, d > 128 ? 1 : 2)                              \
      name##_##type##_d##d(const __grid_constant__ gm::FlashParams p) {                           \
    gm::GM_FLASH<T, d, false>(p, {}, flash_smem);                                                 \
  }                                                                                               \
  extern "C" __global__ void __launch_bounds__(128, d > 128 ? 1 : 2) name##_##type##_d##d##_cap(  \
      const __grid_constant__ gm::FlashParams p, const __grid_constant__ gm::SoftCap<true> cap) { \
    gm::GM_FLASH<T, d, true>(p, cap, flash_smem);                                                 \
  }
GM_EACH(GM_ONE)

#else

namespace {

struct Instance {
  int dtype, head_dim, rows;  // head_dim: of a tile; rows: of a tile
  unsigned smem;
  gm::CudaKernel plain, capped;
};

#define GM_ONE(name, type, code, T, d)  \
  {code,                                \
   d,                                   \
   gm::FlashShape<d, false>::kRows,     \
   unsigned(gm::kFlashBytes<d>),        \
   {GM_CUBIN, #name "_" #type "_d" #d}, \
   {GM_CUBIN, #name "_" #type "_d" #d "_cap"}},
Instance g_instances[] = {GM_EACH(GM_ONE)};

// A call of any batch: a KV head has at most as many query heads as a tile has rows (128, of heads over 128 elements 64). No sequence has more
// than max_ctx keys. scale > 0. workspace: `ctas` integers that are zero, and are zero again after the launch; at parts_at 2 ctas rows
// (d + 2) floats, rows: 16, of heads over 128 elements 8; d: elements of a tile's heads. device < 0 asks for the bytes of shared memory.
int run_flash(const GmPagedAttentionCall& call, bool codes, int64_t ctas, int64_t parts_at, int device,
              void* stream) {
  gm::PagedSizes s;
  if (const int refused = gm::paged_sizes(call, &s)) return refused;
  const int padded = s.head_dim == 80 ? 96 : s.head_dim;
  const Instance* found = nullptr;
  for (const Instance& i : g_instances)
    if (i.dtype == s.dtype && i.head_dim == padded) found = &i;
  if (found == nullptr || s.group > found->rows) return GM_E_SHAPE;
  if (s.codes != codes || ctas < 1 || ctas > INT_MAX / 64 || call.max_ctx < 1) return GM_E_ARG;
  if (device < 0) return int(found->smem);
  gm::FlashParams p{};
  if (s.tokens == 0) return GM_OK;
  if (!gm::fill_params(call, s, 0, parts_at, &p)) return GM_E_SHAPE;
  gm::SoftCap<true> cap = gm::soft_cap(s.softcap, codes ? 0.f : s.scale);
  const int64_t grid = gm::plan_flash(&p, found->rows, s.tokens, ctas, call.max_ctx);
  void* args[] = {&p, &cap};  // the last one is of capped kernels
  const gm::Launch shape{.grid_x = unsigned(grid), .block = 128, .smem = found->smem};
  Instance& instance = g_instances[found - g_instances];
  return grid > INT_MAX
             ? GM_E_SHAPE
             : (s.softcap > 0.f ? instance.capped : instance.plain).launch(device, stream, shape, args);
}

}  // namespace

#endif
