// The activation of gate and up, of the kernels of experts by mma.sync.
#pragma once

#ifdef __CUDACC__
namespace gm {

// silu(gate) * up; with p.clamp g sigmoid(alpha g) (u + 1), g = min(gate, limit) and u = up within -limit .. limit.
// Comparisons with NaN are false, so that NaN passes.
template <typename PARAMS>
__device__ __forceinline__ float swiglu(const PARAMS& p, float gate, float up) {
  if (!p.clamp) return gate / (1.f + expf(-gate)) * up;
  gate = gate > p.limit ? p.limit : gate;
  up = up > p.limit ? p.limit : up < -p.limit ? -p.limit : up;
  return gate / (1.f + expf(-p.alpha * gate)) * (up + 1.f);
}

}  // namespace gm
#endif
