// sm90/ptx.cuh for sm_75 with a maximum that it has instructions for: to be included before any header that includes ptx.cuh.
#pragma once
#define fmax_nan fmax_nan_of_sm80
#include "sm90/ptx.cuh"
#undef fmax_nan

#ifdef __CUDACC__
namespace gm {

// The larger one; NaN if one of them is.
__device__ __forceinline__ float fmax_nan(float a, float b) {
  return a != a || b != b ? __uint_as_float(0x7fffffffu) : fmaxf(a, b);
}

}  // namespace gm
#endif
