// Decode for other head sizes.
#define GM_EACH(K)                                       \
  K(bf16, 2, gm::Floats<__nv_bfloat16>, 80, 8, )         \
  K(bf16, 2, gm::Floats<__nv_bfloat16>, 96, 8, )         \
  K(bf16, 2, gm::Floats<__nv_bfloat16>, 192, 8, )        \
  K(bf16, 2, gm::Floats<__nv_bfloat16>, 256, 8, )        \
  K(fp16, 1, gm::Floats<__half>, 80, 8, )                \
  K(fp16, 1, gm::Floats<__half>, 96, 8, )                \
  K(fp16, 1, gm::Floats<__half>, 192, 8, )               \
  K(fp16, 1, gm::Floats<__half>, 256, 8, )               \
  K(bf16, 2, gm::Floats<__nv_bfloat16>, 80, 16, _rows16) \
  K(bf16, 2, gm::Floats<__nv_bfloat16>, 96, 16, _rows16) \
  K(fp16, 1, gm::Floats<__half>, 80, 16, _rows16)        \
  K(fp16, 1, gm::Floats<__half>, 96, 16, _rows16)

#include "entry.h"

#ifndef __CUDACC__

// As `run` says.
GM_CUDA_CALL(gm_paged_decode_more_sm80, PagedAttention, ctas, parts_at)
(const GmPagedAttentionCall& call, const gm_paged_decode_more_sm80_options& o, int device, void* stream) {
  return run(call, o.ctas, o.parts_at, device, stream);
}

#endif
