// A stand-in for libtorch_cpu.so that exists only while linking: it gives the library its DT_NEEDED entry
// without torch being installed in the build environment. It is never installed and never loaded.
#include "torch_abi.h"

#define GM_STUB __attribute__((visibility("default")))
extern "C" GM_STUB int32_t torch_parallel_for(int64_t, int64_t, int64_t, void (*)(int64_t, int64_t, void*),
                                              void*) {
  return 1;
}
extern "C" GM_STUB int32_t torch_get_num_threads(uint32_t*) { return 1; }
