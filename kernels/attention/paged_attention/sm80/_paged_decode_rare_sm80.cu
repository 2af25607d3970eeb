// Decode for the usual head sizes.
#define GM_EACH(K)                                        \
  K(bf16, 2, gm::Floats<__nv_bfloat16>, 64, 8, )          \
  K(bf16, 2, gm::Floats<__nv_bfloat16>, 128, 8, )         \
  K(fp16, 1, gm::Floats<__half>, 64, 8, )                 \
  K(fp16, 1, gm::Floats<__half>, 128, 8, )                \
  K(bf16, 2, gm::Floats<__nv_bfloat16>, 64, 16, _rows16)  \
  K(bf16, 2, gm::Floats<__nv_bfloat16>, 128, 16, _rows16) \
  K(fp16, 1, gm::Floats<__half>, 64, 16, _rows16)         \
  K(fp16, 1, gm::Floats<__half>, 128, 16, _rows16)

#include "entry.h"

#ifndef __CUDACC__

// As `run` says.
GM_CUDA_CALL(gm_paged_decode_sm80, PagedAttention, ctas, parts_at)
(const GmPagedAttentionCall& call, const gm_paged_decode_sm80_options& o, int device, void* stream) {
  return run(call, o.ctas, o.parts_at, device, stream);
}

#endif
