// Grouped top-k, a warp per row, in the instructions of Turing.
#include "_kernels.h"

#ifndef __CUDACC__
// Option: warps of a block.
GM_CUDA_CALL(gm_grouped_topk_sm75, GroupedTopk, warps)
(const GmGroupedTopkCall& call, const gm_grouped_topk_sm75_options& options, int device, void* stream) {
  return gm::topk::launch(call, options.warps, false, device, stream);
}
#endif
