// The sums of a tile of y on sm_75, in the place of GemmTile::accumulate, which needs cp.async: x and the packed weights of
// the next step are loaded into registers while tensor cores work on those of this one, then stored to shared memory.
// Copies of one step being in flight, two slots of x (64 k each) and one of weights (128 k) suffice: half of the shared
// memory that the rings of sm_80 take, which is what a multiprocessor of Turing has.
#pragma once
#include "sm75/primitives.cuh"

#include "linear/frag16_sm80/gemm_tile.cuh"

#ifdef __CUDACC__
namespace gm {

// Where a warp's two tiles of W lie, of which a group of 128 k is loaded at a time. What is missing is never loaded, and its
// sums never stored.
template <int BYTES>
struct WarpWeights {
  static constexpr int kChunks = kWarpTiles * BYTES / 16, kLoads = (kChunks + 31) / 32;
  const uint8_t* from[kWarpTiles];
  int step[kWarpTiles];  // bytes from a group to the next
  bool has[kWarpTiles];

  __device__ __forceinline__ void load(uint4 (&to)[kLoads], int lane) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int at = (i * 32 + lane) * 16, second = at >= BYTES;
      if (at < kWarpTiles * BYTES && (second ? has[1] : has[0]))
        to[i] = load_16((second ? from[1] - BYTES : from[0]) + at);
    }
#pragma unroll
    for (int r = 0; r < kWarpTiles; ++r) from[r] += step[r];
  }
  static __device__ __forceinline__ void store(uint32_t slot, const uint4 (&words)[kLoads], int lane) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      if (i * 32 + lane < kChunks) st_shared(slot + (i * 32 + lane) * 16, words[i]);
  }
};

// The sums of `tile` over `groups` groups. second: another slot of x. load_x(words): this thread's 16 bytes of each of its
// rows of the next 64 k, zeros past the last.
template <typename Tile, int BYTES, typename LoadX>
__device__ __forceinline__ void accumulate_through_registers(Tile& tile, uint32_t second, int groups,
                                                             WarpWeights<BYTES>& weights, LoadX&& load_x) {
  uint4 x[Tile::kXSlot / (Tile::kXRows * kXBytes)], w[WarpWeights<BYTES>::kLoads];
  const auto store_x = [&](uint32_t slot) {
    const uint32_t to = slot + tile.place_in_x();
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof x / 16); ++i)
      st_shared(to + i * Tile::kXRows * kXBytes, x[i]);
  };
  load_x(x), weights.load(w, tile.lane);
  tile.clear();
  __syncthreads();  // every warp has read the slots of the tile before
  store_x(tile.xs), weights.store(tile.ws, w, tile.lane);
#pragma unroll 1
  for (int left = groups; left > 0; --left) {
    load_x(x);
    __syncthreads();  // the first half of x is there, and every warp has read the second of the group before
    tile.template multiply<0>(tile.xs, tile.ws);
    store_x(second);
    if (left > 1) load_x(x), weights.load(w, tile.lane);
    __syncthreads();
    tile.template multiply<1>(second, tile.ws);
    __syncwarp();  // weights are the warp's own
    if (left > 1) store_x(tile.xs), weights.store(tile.ws, w, tile.lane);
  }
}

}  // namespace gm
#endif
