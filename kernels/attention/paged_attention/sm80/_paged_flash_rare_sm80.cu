// Paged attention for any batch on sm_80 and newer: the kernels by dtype and head size, and their entry point.
#include "flash.cuh"
#include "gm_cuda.h"
#include "attention/paged_attention/sm90/_paged_decode_host_sm90.h"

// Type of q and out, its code, C++ type, elements of a head, keys of a step, suffix of the kernels' names.
#define GM_EACH(K)                            \
  K(bf16, 2, __nv_bfloat16, 64, 64, )         \
  K(bf16, 2, __nv_bfloat16, 128, 32, )        \
  K(bf16, 2, __nv_bfloat16, 128, 64, _keys64) \
  K(bf16, 2, __nv_bfloat16, 256, 32, )        \
  K(fp16, 1, __half, 64, 64, )                \
  K(fp16, 1, __half, 128, 32, )               \
  K(fp16, 1, __half, 128, 64, _keys64)        \
  K(fp16, 1, __half, 256, 32, )

#ifdef __CUDACC__

extern __shared__ __align__(128) uint8_t flash_smem[];

#define GM_ONE(type, code, T, d, keys, suffix)                                                    \
  extern "C" __global__ void __launch_bounds__(128, 2)                                            \
      paged_flash_##type##_d##d##suffix(const __grid_constant__ gm::FlashParams p) {              \
    gm::paged_flash<T, d, false, keys>(p, {}, flash_smem);                                        \
  }                                                                                               \
  extern "C" __global__ void __launch_bounds__(128, 2) paged_flash_##type##_d##d##suffix##_cap(   \
      const __grid_constant__ gm::FlashParams p, const __grid_constant__ gm::SoftCap<true> cap) { \
    gm::paged_flash<T, d, true, keys>(p, cap, flash_smem);                                        \
  }
GM_EACH(GM_ONE)

#else

namespace {

struct Instance {
  int dtype, head_dim, keys, rows;  // keys: of a step; rows: of a tile
  unsigned smem;
  gm::CudaKernel plain, capped;
};

#define GM_ONE(type, code, T, d, keys, suffix)       \
  {code,                                             \
   d,                                                \
   gm::FlashShape<d, false, keys>::kKeys,            \
   gm::FlashShape<d, false, keys>::kRows,            \
   gm::kFlashBytes<d, keys>,                         \
   {GM_CUBIN, "paged_flash_" #type "_d" #d #suffix}, \
   {GM_CUBIN, "paged_flash_" #type "_d" #d #suffix "_cap"}},
Instance g_instances[] = {GM_EACH(GM_ONE)};

}  // namespace

// Any batch: a KV head has at most as many query heads as a tile has rows (128, of heads of 256 elements 64). No sequence has more than max_ctx
// keys. keys: of a step of heads of 128 elements, 32 or 64. scale > 0; the caches hold no codes. workspace: `ctas` integers that are zero, and
// are zero again after the launch; at parts_at 2 ctas rows (head_dim + 2) floats, rows: 16, of heads of 256 elements 8. device < 0 asks for the
// bytes of shared memory.
GM_CUDA_CALL(gm_paged_flash_sm80, PagedAttention, ctas, parts_at, keys)
(const GmPagedAttentionCall& call, const gm_paged_flash_sm80_options& o, int device, void* stream) {
  gm::PagedSizes s;
  if (const int refused = gm::paged_sizes(call, &s)) return refused;
  if (s.codes || o.ctas < 1 || o.ctas > INT_MAX / 64 || call.max_ctx < 1 || (o.keys != 32 && o.keys != 64))
    return GM_E_ARG;
  Instance* instance = nullptr;
  for (Instance& i : g_instances)
    if (i.dtype == s.dtype && i.head_dim == s.head_dim && (s.head_dim != 128 || i.keys == o.keys))
      instance = &i;
  if (instance == nullptr || s.group > instance->rows) return GM_E_SHAPE;
  if (device < 0) return int(instance->smem);
  if (s.tokens == 0) return GM_OK;
  gm::FlashParams p{};
  if (!gm::fill_params(call, s, 0, o.parts_at, &p)) return GM_E_SHAPE;
  gm::SoftCap<true> cap = gm::soft_cap(s.softcap, s.scale);
  const int64_t grid = gm::plan_flash(&p, instance->rows, s.tokens, o.ctas, call.max_ctx);
  if (grid > INT_MAX) return GM_E_SHAPE;
  void* args[] = {&p, &cap};  // the last one is of capped kernels
  gm::CudaKernel& kernel = s.softcap > 0.f ? instance->capped : instance->plain;
  return kernel.launch(device, stream, {.grid_x = unsigned(grid), .block = 128, .smem = instance->smem},
                       args);
}

#endif
