// Paged attention for any batch on sm_80 and newer: heads of 80, 96 and 192 elements.
#define GM_FLASH paged_flash_padded
#define GM_EACH(K)                                 \
  K(paged_flash_more, bf16, 2, __nv_bfloat16, 96)  \
  K(paged_flash_more, bf16, 2, __nv_bfloat16, 192) \
  K(paged_flash_more, fp16, 1, __half, 96)         \
  K(paged_flash_more, fp16, 1, __half, 192)

#include "flash_entry.h"

#ifndef __CUDACC__

// As `run_flash` says.
GM_CUDA_CALL(gm_paged_flash_more_sm80, PagedAttention, ctas, parts_at)
(const GmPagedAttentionCall& call, const gm_paged_flash_more_sm80_options& o, int device, void* stream) {
  return run_flash(call, false, o.ctas, o.parts_at, device, stream);
}

#endif
