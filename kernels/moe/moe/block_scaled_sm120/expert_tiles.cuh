// Tiles of y of MT rows of one expert each, rows of y sorted by expert. How many there are depends on the offsets of the experts, which are on the
// device: every CTA makes the list of them, in shared memory.
#pragma once

#ifdef __CUDACC__
namespace gm::block_scaled {

struct ExpertTiles {
  int experts;
  int *first, *starts;  // [experts + 1]: tiles along M of the experts before, and the first row of y

  // By all threads of a CTA.
  template <int MT, int THREADS>
  __device__ __forceinline__ void list(const int* offsets) const {
    for (int e = threadIdx.x; e <= experts; e += THREADS) starts[e] = offsets[e];
    __syncthreads();
    if (threadIdx.x < 32) {
      const int lane = threadIdx.x;
      int total = 0;
      for (int base = 0; base <= experts; base += 32) {  // the sum of all is of an expert past the last
        const int e = base + lane;
        const int mine = e < experts ? (starts[e + 1] - starts[e] + MT - 1) / MT : 0;
        int through = mine;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
          const int before = __shfl_up_sync(0xffffffffu, through, step);
          if (lane >= step) through += before;
        }
        if (e <= experts) first[e] = total + through - mine;
        total += __shfl_sync(0xffffffffu, through, 31);
      }
    }
    __syncthreads();
  }

  __device__ __forceinline__ int count() const { return first[experts]; }

  // The expert of a tile: the last one whose first tile is not behind it.
  __device__ __forceinline__ int expert_of(int tile) const {
    int expert = 0, after = experts;
    while (after - expert > 1) {
      const int middle = (expert + after) / 2;
      (first[middle] <= tile ? expert : after) = middle;
    }
    return expert;
  }
};

}  // namespace gm::block_scaled
#endif
