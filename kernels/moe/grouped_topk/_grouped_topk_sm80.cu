// Grouped top-k, a warp per row, for every GPU from sm_80 on.
#include "_kernels.h"

#ifndef __CUDACC__
// Option: warps of a block.
GM_CUDA_CALL(gm_grouped_topk_sm80, GroupedTopk, warps)
(const GmGroupedTopkCall& call, const gm_grouped_topk_sm80_options& options, int device, void* stream) {
  return gm::topk::launch(call, options.warps, false, device, stream);
}
#endif
