// Paged attention for any batch on sm_80 and newer, over caches of e4m3 codes.
#define GM_FLASH paged_flash_codes
#define GM_EACH(K)                                  \
  K(paged_flash_codes, bf16, 2, __nv_bfloat16, 64)  \
  K(paged_flash_codes, bf16, 2, __nv_bfloat16, 96)  \
  K(paged_flash_codes, bf16, 2, __nv_bfloat16, 128) \
  K(paged_flash_codes, bf16, 2, __nv_bfloat16, 192) \
  K(paged_flash_codes, bf16, 2, __nv_bfloat16, 256) \
  K(paged_flash_codes, fp16, 1, __half, 64)         \
  K(paged_flash_codes, fp16, 1, __half, 96)         \
  K(paged_flash_codes, fp16, 1, __half, 128)        \
  K(paged_flash_codes, fp16, 1, __half, 192)        \
  K(paged_flash_codes, fp16, 1, __half, 256)

#include "flash_entry.h"

#ifndef __CUDACC__

// As `run_flash` says.
GM_CUDA_CALL(gm_paged_flash_codes_sm80, PagedAttention, ctas, parts_at)
(const GmPagedAttentionCall& call, const gm_paged_flash_codes_sm80_options& o, int device, void* stream) {
  return run_flash(call, true, o.ctas, o.parts_at, device, stream);
}

#endif
