// The schedule gemm of ../frag16_sm80/gemm.cuh for sm_75: what a CTA multiplies goes through registers instead of rings of
// cp.async (through_registers.cuh). Partition, parts of tiles along K and epilogue are those of the base.
#pragma once
#include "through_registers.cuh"

#include "linear/frag16_sm80/gemm.cuh"

#ifdef __CUDACC__
namespace gm {

// Two slots of x and one of weights: what rings of cp.async cannot be (GemmTile), and all that this pipeline needs. The base
// has the places of the first slots.
template <typename W, int MT, int WN>
struct Gemm<W, MT, WN, 2, 1> : Gemm<W, MT, WN, 1, 1> {
  using Base = Gemm<W, MT, WN, 1, 1>;
  using Base::Base, Base::begin, Base::kXRows, Base::meet, Base::p, Base::row0, Base::store, Base::tile0;

  // The sums of a tile of y over groups [g0, g1).
  __device__ __forceinline__ void accumulate(int block, int g0, int g1) {
    const int tile = tile0(block), base = tile & ~3, in_block = min(4, p.tiles - base);
    const int64_t place = static_cast<int64_t>(base) * p.groups + static_cast<int64_t>(g0) * in_block;
    const uint8_t* from = p.w + (place + (tile - base)) * W::kBytes;
    const int step = in_block * W::kBytes;
    WarpWeights<W::kBytes> weights{
        {from, from + W::kBytes}, {step, step}, {tile < p.tiles, tile + 1 < p.tiles}};

    const int row = row0(block) + (threadIdx.x >> 3), column = g0 * kTileK + (threadIdx.x & 7) * 8;
    const char* x_from = static_cast<const char*>(p.x) + (row * p.ldx + column) * 2;
    const int rows = p.m - row;
    int columns = min(p.k, g1 * kTileK) - column;  // from this thread's chunk on
    accumulate_through_registers(
        *this, this->xs + Base::kXSlot + Base::kWSlot, g1 - g0, weights, [&](uint4(&to)[MT / kXRows]) {
#pragma unroll
          for (int i = 0; i < MT / kXRows; ++i)
            to[i] = load_16(x_from + i * p.x_step, rows > i * kXRows ? 2 * columns : 0);
          x_from += kXBytes, columns -= 64;
        });
  }

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (int block = blockIdx.x; block < p.whole; block += gridDim.x)
      accumulate(block, 0, p.groups), store(block);
#pragma unroll 1
    for (int at = begin(blockIdx.x); at < begin(blockIdx.x + 1);) {
      const int shared = at / p.groups, g0 = at - shared * p.groups,
                g1 = min(p.groups, begin(blockIdx.x + 1) - shared * p.groups);
      accumulate(p.whole + shared, g0, g1);
      at += g1 - g0;
      if (g1 - g0 == p.groups || meet(shared)) store(p.whole + shared);
    }
  }
};

}  // namespace gm
#endif
