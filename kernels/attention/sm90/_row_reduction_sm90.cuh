// Reductions over the scores of a thread's two rows, in the order in which wgmma has them: two columns of the one row,
// two of the other.
#pragma once
#include "sm90/ptx.cuh"

#ifdef __CUDACC__
namespace gm {

// Reductions run in so many chains per row. In one chain every step waits for the one before, and a tile of 128 keys
// would take 350 cycles, a sixth of the time of its products.
constexpr int kChains = 4;

// out[r]: row r's elements, reduced by `step`, which is associative and commutative.
template <int N, typename Step>
__device__ __forceinline__ void reduce_rows(const float (&of)[N], float (&out)[2], const Step& step) {
  static_assert(N >= 4 * kChains);
  float chain[2][kChains];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int r = i >> 1 & 1, column = (i >> 2) * 2 + (i & 1);
    float& at = chain[r][column % kChains];
    at = column < kChains ? of[i] : step(at, of[i]);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) out[r] = step(step(chain[r][0], chain[r][1]), step(chain[r][2], chain[r][3]));
}

}  // namespace gm
#endif
