// Wgmma<T, N> of wgmma.cuh for N = 80, 96, 160, 192 and 224: tiles for numbers of rows between powers of two. In a file of
// its own, since a change of wgmma.cuh compiles all of Hopper's kernels again.
#pragma once
#include "sm90/wgmma.cuh"

#ifdef __CUDACC__
namespace gm {

#define GM_WGMMAS_ROWS(T, TYPE)                                                                 \
  GM_WGMMA_16(T, TYPE, 80, GM_D40, GM_R40, "%40", "%41", "%42", "%43", "%44", "%45", "%46")     \
  GM_WGMMA_16(T, TYPE, 96, GM_D48, GM_R48, "%48", "%49", "%50", "%51", "%52", "%53", "%54")     \
  GM_WGMMA_16(T, TYPE, 160, GM_D80, GM_R80, "%80", "%81", "%82", "%83", "%84", "%85", "%86")    \
  GM_WGMMA_16(T, TYPE, 192, GM_D96, GM_R96, "%96", "%97", "%98", "%99", "%100", "%101", "%102") \
  GM_WGMMA_16(T, TYPE, 224, GM_D112, GM_R112, "%112", "%113", "%114", "%115", "%116", "%117", "%118")

GM_WGMMAS_ROWS(__nv_bfloat16, "bf16")
GM_WGMMAS_ROWS(__half, "f16")

}  // namespace gm
#endif
