// Grouped top-k, a warp per row, for Hopper, which starts it while the kernel before ends.
#define GM_OVERLAP
#include "sm90/ptx.cuh"
// It uses that.
#include "_kernels.h"

#ifndef __CUDACC__
// Option: warps of a block.
GM_CUDA_CALL(gm_grouped_topk_sm90, GroupedTopk, warps)
(const GmGroupedTopkCall& call, const gm_grouped_topk_sm90_options& options, int device, void* stream) {
  return gm::topk::launch(call, options.warps, true, device, stream);
}
#endif
