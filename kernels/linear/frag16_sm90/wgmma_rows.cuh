// Wgmma<T, N> of wgmma.cuh for N = 80, 96, 160, 192 and 224: tiles for numbers of rows between powers of two. In a file of
// its own, since a change of wgmma.cuh compiles all of Hopper's kernels again.
#pragma once
#include "sm90/wgmma.cuh"

#ifdef __CUDACC__
namespace gm {

#define GM_D40 GM_D32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define GM_D48 GM_D40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define GM_D80 GM_D64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define GM_D96 GM_D80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define GM_D112 \
  GM_D96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define GM_R40(R, i) GM_R32(R, i), GM_R8(R, i + 32)
#define GM_R48(R, i) GM_R32(R, i), GM_R16(R, i + 32)
#define GM_R80(R, i) GM_R64(R, i), GM_R16(R, i + 64)
#define GM_R96(R, i) GM_R64(R, i), GM_R32(R, i + 64)
#define GM_R112(R, i) GM_R96(R, i), GM_R16(R, i + 96)

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
