// Eight neighbouring columns of a row of y from float32 sums, with bias and residual.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#include "sm90/ptx.cuh"

namespace gm {

// Element `index` of fp16 or bf16 numbers.
__device__ __forceinline__ float widened(const void* from, int64_t index, int half) {
  return half ? __half2float(static_cast<const __half*>(from)[index])
              : __bfloat162float(static_cast<const __nv_bfloat16*>(from)[index]);
}
// Two of them; by functions that Turing has, too.
__device__ __forceinline__ uint32_t rounded(float low, float high, int half) {
  if (half) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Writes y[at : at + count], count at most 8: finished(i), the i-th sum times its scales and with its bias, plus the
// residual. p has y, residual (or null), half (fp16, else bf16), and vectors (rows of both are 16-byte aligned). `buffer`
// are eight floats of the lane in shared memory. finished() rounds products and sums one by one, so that both paths give
// the same bits.
template <typename PARAMS, typename F>
__device__ __forceinline__ void write_eight(const PARAMS& p, float* buffer, int64_t at, int count,
                                            const F& finished) {
  const auto* residual = static_cast<const uint16_t*>(p.residual) + at;
  auto* y = static_cast<uint16_t*>(p.y) + at;
  if (p.vectors && count == 8) {
    uint4 words = make_uint4(0, 0, 0, 0);  // zeros of either type
    if (p.residual) words = *reinterpret_cast<const uint4*>(residual);
    uint32_t to[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      to[i] = rounded(finished(2 * i) + widened(&words, 2 * i, p.half),
                      finished(2 * i + 1) + widened(&words, 2 * i + 1, p.half), p.half);
    *reinterpret_cast<uint4*>(y) = make_uint4(to[0], to[1], to[2], to[3]);
  } else {  // back to the buffer, from which a short loop takes them
#pragma unroll
    for (int i = 0; i < 8; ++i) buffer[i] = finished(i);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const float v = buffer[i] + (p.residual ? widened(residual, i, p.half) : 0.f);
      y[i] = static_cast<uint16_t>(rounded(v, v, p.half));
    }
  }
}

}  // namespace gm
#endif
