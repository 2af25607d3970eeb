// Tiles of y, dealt out to persistent CTAs. Those that fill whole waves have a CTA each; the rest is dealt out along K in
// equal parts (stream-K; Osama et al., 2023). The last CTA of a tile to arrive adds the parts in the order of columns: no
// CTA waits for another, and the bits do not depend on who is last.
#pragma once
#include <cstdint>

#ifdef __CUDACC__

namespace gm {

// KERNEL derives from this. Its p has groups (slots of columns of a tile), blocks (tiles), whole (those that are not
// shared), counters (of shared tiles, zero before and after) and sums ([CTAs][2][WARPS][TILES][COLUMNS][32 lanes], in
// fours); acc [TILES][COLUMNS][4] are a lane's sums, FOUR a vector of four of them. It has warp, lane,
// accumulate(tile, first group, last group) and store(tile).
template <typename KERNEL, typename FOUR, int WARPS, int TILES, int COLUMNS>
struct StreamK {
  __device__ __forceinline__ KERNEL& self() { return static_cast<KERNEL&>(*this); }
  __device__ __forceinline__ const KERNEL& self() const { return static_cast<const KERNEL&>(*this); }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < TILES * COLUMNS * 4; ++i) self().acc[i / 4 / COLUMNS][i / 4 % COLUMNS][i % 4] = 0;
  }

  // Where CTA `cta` begins in the shared tiles, in groups, and which CTA has a group of them.
  __device__ __forceinline__ int64_t shared_groups() const {
    return static_cast<int64_t>(self().p.blocks - self().p.whole) * self().p.groups;
  }
  __device__ __forceinline__ int begin(int cta) const { return shared_groups() * cta / gridDim.x; }
  __device__ __forceinline__ int owner(int group) const {
    return ((static_cast<int64_t>(group) + 1) * gridDim.x - 1) / shared_groups();
  }
  // The sums of a CTA for a shared tile: a CTA has parts of two at most that are not whole.
  __device__ __forceinline__ FOUR* sums_of(int cta, int shared) const {
    const int second = begin(cta) < shared * self().p.groups;
    const int64_t warp = (static_cast<int64_t>(cta) * 2 + second) * WARPS + self().warp;
    return static_cast<FOUR*>(self().p.sums) + warp * (TILES * COLUMNS * 32) + self().lane;
  }
  // Hands in this CTA's part of a shared tile; the last CTA to arrive adds all parts, and gets true.
  __device__ __forceinline__ bool meet(int shared) {
    __shared__ int is_last;
    auto& acc = self().acc;
    const int groups = self().p.groups;
    const int first = owner(shared * groups), last = owner((shared + 1) * groups - 1);
    FOUR* to = sums_of(blockIdx.x, shared);
#pragma unroll
    for (int i = 0; i < TILES * COLUMNS; ++i) {
      const auto& sum = acc[i / COLUMNS][i % COLUMNS];
      __stcg(to + i * 32, FOUR{sum[0], sum[1], sum[2], sum[3]});
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      uint32_t* counter = self().p.counters + shared;
      is_last = atomicAdd(counter, 1u) == static_cast<uint32_t>(last - first);
      if (is_last) *counter = 0;
    }
    __syncthreads();
    if (!is_last) return false;
    __threadfence();
    clear();
#pragma unroll 1
    for (int cta = first; cta <= last; ++cta) {
      const FOUR* from = sums_of(cta, shared);
#pragma unroll
      for (int i = 0; i < TILES * COLUMNS; ++i) {
        if (i % 8 == 0) __syncwarp();  // bounds how many loads are in flight, and so registers
        const FOUR part = __ldcg(from + i * 32);
        auto& sum = acc[i / COLUMNS][i % COLUMNS];
        sum[0] += part.x, sum[1] += part.y, sum[2] += part.z, sum[3] += part.w;
      }
    }
    return true;
  }

  // Whole tiles, then parts of shared ones, in one loop, so that there is one copy of the code.
  __device__ __forceinline__ void run() {
    const int groups = self().p.groups, whole = self().p.whole, end = begin(blockIdx.x + 1);
    int block = blockIdx.x, at = begin(blockIdx.x);
#pragma unroll 1
    while (block < whole || at < end) {
      int tile = block, shared = 0, g0 = 0, g1 = groups;
      if (block < whole) {
        block += gridDim.x;
      } else {
        shared = at / groups, g0 = at - shared * groups, g1 = min(groups, end - shared * groups);
        tile = whole + shared, at += g1 - g0;
      }
      self().accumulate(tile, g0, g1);
      if (g1 - g0 == groups || meet(shared)) self().store(tile);
    }
  }
};

}  // namespace gm

#else  // host
#include "gm_cuda.h"

namespace gm {

// Tiles of `height` rows and `width` columns of y [a.m, a.n] by a.grid CTAs; p.groups is set. If any may be, those past the
// last whole wave are shared, where every CTA gets a group of them, so that the CTAs of a tile follow each other. False if
// there are too many.
template <typename PARAMS, typename ARGS>
bool deal_tiles(PARAMS& p, const ARGS& a, int height, int width) {
  const int64_t high = (int64_t(a.m) + height - 1) / height, blocks = high * ceil_div(a.n, width);
  if (blocks * p.groups > INT32_MAX) return false;
  const int rest = int(blocks) % a.grid;
  p.high = int(high), p.blocks = int(blocks);
  p.whole = a.share && int64_t(rest) * p.groups >= a.grid ? p.blocks - rest : p.blocks;
  return true;
}

// Launches a kernel over them.
template <typename PARAMS, typename ARGS>
int launch_tiles(CudaKernel& kernel, PARAMS& p, const ARGS& a, int warps, int smem) {
  const bool shared = p.whole < p.blocks;
  if (shared && (a.counters == nullptr || !is_aligned(a.sums) || a.sums == nullptr)) return GM_E_ARG;
  const unsigned grid = shared || a.grid < p.blocks ? a.grid : p.blocks;
  void* arguments[] = {&p};
  return kernel.launch(a.device, a.stream,
                       {.grid_x = grid, .block = unsigned(warps * 32), .smem = unsigned(smem)}, arguments);
}

}  // namespace gm
#endif
