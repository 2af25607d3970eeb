// y[M, N] = x[M, K] · W[N, K]^T of 16-bit floats for a few dozen rows of x, at the speed at which W is read.
//
// Y^T = W X^T: rows of W are wgmma's M, rows of x its N, both from shared memory.
//  - One warp copies W and x by TMA to a ring of slots of 64 columns, as deep as shared memory allows; warpgroups multiply 64
//    rows of W each by the same x. W of the first slots is requested before the previous kernel has ended.
//  - A CTA has `rows` rows of W, which are all of them multiplied by an x that is copied once: x's share of what comes from L2
//    is M / rows. The CTAs of a cluster have the same rows and a slice of K each.
//  - Sums go to shared memory by rows of x, where the ring was. Every CTA of the cluster then adds a share of the tile's
//    numbers over all of them, in the order of ranks: the result is bitwise reproducible.
//  - With silu_mul one half of a CTA's rows are gate and the other half the same rows of up.
#pragma once
#include "params.h"
#ifdef __CUDACC__
#include "sm90/mma.cuh"
#include "sm90/tma.cuh"
#include "sm90/wgmma.cuh"

namespace gm::dense_mid {

constexpr int kDone = 1;  // named barrier of the warps that multiply

// A position in the ring.
template <class S>
struct Place {
  int index = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next(int slots) {
    if (++index == slots) index = 0, parity ^= 1;
  }
  __device__ __forceinline__ uint32_t full(uint32_t base) const { return base + index * 16; }
  __device__ __forceinline__ uint32_t empty(uint32_t base) const { return base + index * 16 + 8; }
};

// Copies `steps` slots from step `first` on, by one thread. In front of it: barriers, and W of the first slots.
template <class S>
struct Producer {
  const CUtensorMap &w_map, &x_map;
  uint32_t base;
  int slots, first, steps, n0;

  __device__ __forceinline__ void load_w(const Place<S>& place, int step) const {
    mbar_arrive_expect_tx(place.full(base), S::kSlot);
    tma_load(base + kRing + place.index * S::kWSlot, &w_map, (first + step) * kStep, n0, 0, place.full(base));
  }
  __device__ __forceinline__ void load_x(const Place<S>& place, int step) const {
    tma_load(base + kRing + slots * S::kWSlot + place.index * S::kXSlot, &x_map, (first + step) * kStep, 0,
             place.full(base));
  }
  __device__ __forceinline__ void begin() const {
    for (int i = 0; i < slots; ++i) {
      mbar_init(base + i * 16, 1);
      mbar_init(base + i * 16 + 8, S::kConsumers / 32 * kArrivingLanes);
    }
    fence_mbarrier_init();
    Place<S> place;
    for (int i = 0; i < min(slots, steps); ++i, place.next(slots)) load_w(place, i);
  }
  __device__ __forceinline__ void run() const {
    griddepcontrol_wait();  // the previous kernel wrote x
    Place<S> place;
    int step = 0;
    for (; step < min(slots, steps); ++step, place.next(slots)) load_x(place, step);
    for (; step < steps; ++step, place.next(slots)) {
      mbar_wait(place.empty(base), place.parity ^ 1);
      load_w(place, step);
      load_x(place, step);
    }
  }
};

// The sums of a warpgroup's 64 rows of W over `steps` slots.
template <typename T, class S>
__device__ __forceinline__ void multiply(float (&sums)[S::kWidth / 2], uint32_t base, int slots, int steps,
                                         int warpgroup) {
  const uint32_t first_a = static_cast<uint32_t>(
                     swizzle128_descriptor(base + kRing + warpgroup * (kBlockRows * kStep * 2))),
                 first_b = static_cast<uint32_t>(swizzle128_descriptor(base + kRing + slots * S::kWSlot));
  const uint64_t upper = swizzle128_descriptor(0) >> 32 << 32;
  const bool arrives = (threadIdx.x & 31) < kArrivingLanes;
  Place<S> place;
  uint32_t before = 0;  // the empty barrier of the slot before
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    const uint32_t a = warp_uniform(first_a + place.index * (S::kWSlot / 16)),
                   b = warp_uniform(first_b + place.index * (S::kXSlot / 16));
    mbar_wait(place.full(base), place.parity);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < kStep / 16; ++s)
      Wgmma<T, S::kWidth>::ss(sums, upper | (a + s * 2), upper | (b + s * 2), 1);
    wgmma_commit();
    if (i > 0) {
      wgmma_wait<1>();
      if (arrives) mbar_arrive(before);
    }
    before = place.empty(base);
    place.next(slots);
  }
  wgmma_wait<0>();
  wgmma_fence_operand(sums);
}

// Four numbers in a row.
template <typename T>
struct Four {
  float v[4];
  // The first `count` of them, from an aligned place if all are there.
  static __device__ __forceinline__ Four load(const T* from, int count, bool aligned) {
    Four four{};
    if (aligned) {
      const uint2 words = *reinterpret_cast<const uint2*>(from);
      const T* const parts = reinterpret_cast<const T*>(&words);
#pragma unroll
      for (int i = 0; i < 4; ++i) four.v[i] = Num<T>::to_float(parts[i]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (i < count) four.v[i] = Num<T>::to_float(from[i]);
    }
    return four;
  }
  __device__ __forceinline__ void store(T* to, int count, bool aligned) const {
    if (aligned) {
      *reinterpret_cast<uint2*>(to) = make_uint2(packed<T>(v[0], v[1]), packed<T>(v[2], v[3]));
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (i < count) to[i] = Num<T>::round(v[i]);
    }
  }
  __device__ __forceinline__ void add(const Four& other) {
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] += other.v[i];
  }
};

// Adds the sums of the cluster's CTAs for this one's share of the tile's numbers of y, and stores them. staged: sums of this
// CTA, of all of them in the same place.
template <typename T, class S>
__device__ __forceinline__ void finish(const Params& p, float* staged, int rank, int tile) {
  constexpr float kLog2E = 1.44269504f;
  const auto total = [&](int at) {
    float4 parts[kMostSplit];
#pragma unroll
    for (int r = 0; r < kMostSplit; ++r)  // loads that do not wait for each other
      if (r < p.split)
        parts[r] = *reinterpret_cast<const float4*>(p.split > 1 ? mapa(staged + at, r) : staged + at);
    Four<T> sum{{parts[0].x, parts[0].y, parts[0].z, parts[0].w}};
#pragma unroll
    for (int r = 1; r < kMostSplit; ++r)
      if (r < p.split) sum.add({{parts[r].x, parts[r].y, parts[r].z, parts[r].w}});
    return sum;
  };
  const auto bias = [&](int n, int count) {
    return Four<T>::load(static_cast<const T*>(p.bias) + n, count, p.vectors && count >= 4);
  };
  const int columns = p.gated ? S::kRows / 2 : S::kRows, quads = columns / 4, n0 = tile * columns;
  const int items = p.m * quads, last = items * (rank + 1) / p.split;
  for (int item = items * rank / p.split + threadIdx.x; item < last; item += S::kConsumers) {
    const int m = item / quads, q = (item - m * quads) * 4, n = n0 + q, count = p.out_n - n;
    if (count <= 0) continue;
    Four<T> z = total(m * S::kPitch + q);
    if (p.bias != nullptr) z.add(bias(n, count));
    if (p.gated) {
      Four<T> up = total(m * S::kPitch + columns + q);
      if (p.bias != nullptr) up.add(bias(n + p.out_n, count));
#pragma unroll
      for (int i = 0; i < 4; ++i) z.v[i] *= rcp_approx(1.f + exp2_approx(-kLog2E * z.v[i])) * up.v[i];
    }
    const int64_t to = static_cast<int64_t>(m) * p.out_n + n;
    const bool aligned = p.vectors && count >= 4;
    if (p.residual != nullptr) z.add(Four<T>::load(static_cast<const T*>(p.residual) + to, count, aligned));
    z.store(static_cast<T*>(p.y) + to, count, aligned);
  }
}

// Waits until no CTA of the cluster reads another's sums. What they read has been added, and nobody reads what was written since:
// an arrival that releases would wait until y is in memory.
__device__ __forceinline__ void leave() {
  cluster_arrive_relaxed();
  cluster_wait();
}

template <typename T, class S>
__device__ __forceinline__ void product(const Params& p, const CUtensorMap& w_map, const CUtensorMap& x_map,
                                        uint8_t* smem) {
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  const uint32_t base = smem_u32_once(smem);
  const int tile = blockIdx.x / p.split, rank = blockIdx.x - tile * p.split;
  const int first = p.steps * rank / p.split, steps = p.steps * (rank + 1) / p.split - first;
  const bool copies = warp == S::kConsumers / 32;
  const Producer<S> producer{
      w_map, x_map, base, p.slots, first, steps, tile * (p.gated ? S::kRows / 2 : S::kRows)};
  if (copies && lane == 0) producer.begin();
  __syncwarp();
  __syncthreads();
  griddepcontrol_launch_dependents();
  if (copies) {
    if (lane == 0) producer.run();
    __syncwarp();
    if (p.split > 1) leave(), leave();  // it wrote nothing that others read
    return;
  }
  float sums[S::kWidth / 2] = {};
  multiply<T, S>(sums, base, p.slots, steps, warp >> 2);

  bar_sync(kDone, S::kConsumers);  // nobody reads the ring
  float* const staged = reinterpret_cast<float*>(smem + kRing);
  const int row = warp * 16 + (lane >> 2);
#pragma unroll
  for (int i = 0; i < S::kWidth / 2; i += 4)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int m = i * 2 + (lane & 3) * 2 + j;
      if (m < p.m) {
        staged[m * S::kPitch + row] = sums[i + j];
        staged[m * S::kPitch + row + 8] = sums[i + j + 2];
      }
    }
  griddepcontrol_wait();  // the previous kernel may have written the residual, or read y's memory
  if (p.split == 1) {
    bar_sync(kDone, S::kConsumers);
    finish<T, S>(p, staged, 0, tile);
  } else {
    cluster_sync();
    finish<T, S>(p, staged, rank, tile);
    leave();
  }
}

}  // namespace gm::dense_mid
#endif
