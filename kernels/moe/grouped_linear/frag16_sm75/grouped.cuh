// ../frag16_sm80/grouped.cuh for sm_75: what a CTA multiplies goes through registers instead of rings of cp.async
// (linear/frag16_sm75/through_registers.cuh). The list of tiles, epilogues and stores are those of the base.
#pragma once
#include "linear/frag16_sm75/through_registers.cuh"

#include "moe/grouped_linear/frag16_sm80/grouped.cuh"

#ifdef __CUDACC__
namespace gm {

// Two slots of x and one of weights, as Gemm has them for sm_75. The base has the places of the first slots; the list of tiles
// is behind the second slot of x.
template <typename W, int MT, int WN>
struct Grouped<W, MT, WN, 2, 1> : Grouped<W, MT, WN, 1, 1> {
  using Base = Grouped<W, MT, WN, 1, 1>;
  using Base::end, Base::expert, Base::first, Base::kXRows, Base::p, Base::row, Base::tile;

  __device__ __forceinline__ Grouped(const GroupedParams& p, uint8_t* smem) : Base(p, smem) {
    first += Base::kXSlot / 4, this->starts += Base::kXSlot / 4;
  }

  // The sums of the tile of y.
  __device__ __forceinline__ void accumulate() {
    WarpWeights<W::kBytes> weights;
#pragma unroll
    for (int r = 0; r < kWarpTiles; ++r) {
      const int base = tile[r] & ~3;
      weights.step[r] = min(4, p.tiles - base) * W::kBytes;
      weights.from[r] = p.w + expert * p.expert_bytes +
                        (static_cast<int64_t>(base) * p.groups + (tile[r] - base)) * W::kBytes;
      weights.has[r] = Base::has(r);
    }
    const int mine = row + (threadIdx.x >> 3), rows = end - mine;
    uint32_t source[MT / kXRows];  // of x, in chunks of 16 bytes
#pragma unroll
    for (int i = 0; i < MT / kXRows; ++i) {
      const int at = rows > i * kXRows ? mine + i * kXRows : row;
      source[i] = (p.permutation ? p.permutation[at] / p.top_k : at) * p.x_chunks;
    }
    const char* x_from = static_cast<const char*>(p.x) + (threadIdx.x & 7) * 16;
    int columns = p.k - (threadIdx.x & 7) * 8;
    accumulate_through_registers(*this, this->xs + Base::kXSlot + Base::kWSlot, p.groups, weights,
                                 [&](uint4(&to)[MT / kXRows]) {
#pragma unroll
                                   for (int i = 0; i < MT / kXRows; ++i) {
                                     to[i] = make_uint4(0, 0, 0, 0);
                                     if (columns > 0 && rows > i * kXRows)
                                       to[i] = load_16(x_from + static_cast<uint64_t>(source[i]) * 16);
                                   }
                                   x_from += kXBytes, columns -= 64;
                                 });
  }

  __device__ __forceinline__ void run() {
    this->list();
    const int tiles = first[p.experts] * p.blocks;
#pragma unroll 1
    for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
      this->enter(index);
      accumulate();
      this->finish();
      if (p.gated)
        Base::template store<1>();
      else
        Base::template store<kWarpTiles>();
    }
    // Rows of no expert are 0.
#pragma unroll 1
    for (int64_t m = this->starts[p.experts] + blockIdx.x; m < p.rows; m += gridDim.x)
      for (int n = threadIdx.x; n < p.out_n; n += Base::kThreads)
        static_cast<typename Base::T*>(p.y)[m * p.out_n + n] = Num<typename Base::T>::round(0.f);
  }
};

}  // namespace gm
#endif
