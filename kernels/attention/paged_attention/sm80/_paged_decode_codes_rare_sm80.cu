// Decode over caches of e4m3 codes.
#define GM_EACH(K)                 \
  K(codes, 0, gm::Codes, 64, 8, )  \
  K(codes, 0, gm::Codes, 80, 8, )  \
  K(codes, 0, gm::Codes, 96, 8, )  \
  K(codes, 0, gm::Codes, 128, 8, ) \
  K(codes, 0, gm::Codes, 192, 8, ) \
  K(codes, 0, gm::Codes, 256, 8, )

#include "entry.h"

#ifndef __CUDACC__

// As `run` says.
GM_CUDA_CALL(gm_paged_decode_codes_sm80, PagedAttention, ctas, parts_at)
(const GmPagedAttentionCall& call, const gm_paged_decode_codes_sm80_options& o, int device, void* stream) {
  return run(call, o.ctas, o.parts_at, device, stream);
}

#endif
