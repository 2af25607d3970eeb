// Threads of the CPU kernels, from torch's pool: torch.set_num_threads() applies, and two pools do not oversubscribe
// the processor.
#include "torch_abi.h"

extern "C" int gm_parallel_raw(int64_t n, int64_t grain, void (*body)(int64_t, int64_t, void*),
                               void* context) {
  if (n <= grain) {  // not worth a region
    body(0, n, context);
    return 0;
  }
  return torch_parallel_for(0, n, grain, body, context) == 0 ? 0 : -4 /* GM_E_THREADS */;
}

extern "C" int gm_num_threads() {
  uint32_t threads = 1;
  return torch_get_num_threads(&threads) == 0 ? int(threads) : 1;
}
