// Absorbed latent attention over a paged cache for Hopper: decodes, speculative tokens and chunks.
//
// FlashMLA's schedule (DeepSeek, 2025): the accumulators of 64 rows are split by columns over two warpgroups, which
// alternate tiles of keys: one computes the weights of a tile, multiplies its half of the values by them, and passes
// them to the other one through shared memory. Beyond it:
//  - a producer warpgroup copies half of the latents of a tile at a time: a half is released once its values are
//    multiplied, and the scores of the next tile start when the first half has landed;
//  - pages of any size, in groups of eight keys, so that one layout serves both products;
//  - scheduling on the device, with contexts cut evenly and merged in the same launch (_mla_work_sm90.cuh).
#pragma once
#include "_mla_copy_sm90.cuh"
#include "_mla_merge_sm90.cuh"
#include "sm90/wgmma.cuh"

#ifdef __CUDACC__
namespace gm::mla {

enum : int {
  kBarWeights = kBarCopying + 1,  // weights of the first warpgroup are published; those of the second
};

// A consumer warpgroup: GROUP 0 has tiles of keys 0, 2, .. of each work tile, and columns 0 .. 255.
template <typename T, bool BOXES, int GROUP>
class MlaConsumer {
 public:
  using S = MlaShape;
  __device__ __forceinline__ MlaConsumer(const MlaParams& p, uint8_t* smem, uint32_t base)
      : p_(p),
        smem_(smem),
        base_(base),
        bars_{base + S::kBars},
        lane_(threadIdx.x & 31),
        tid_(threadIdx.x & 127),
        row_((threadIdx.x >> 5 & 3) * 16 + (threadIdx.x & 31) / 4),
        q_(swizzle128_descriptor(warp_uniform(base + S::kQ), 1024, 16)) {}

  // Attends until work of another kind comes, which is returned. phase: parity of its barrier.
  __device__ __forceinline__ MlaWork run(uint32_t& phase) {
    for (phase = 0;; phase ^= 1) {
      mbar_wait(bars_.q_full(), phase);
      work_ = get_mla_work(smem_ + S::kWork);
      if (work_.kind != kAttend) return work_;
      attend();
      finish(phase);
    }
  }

 private:
  const MlaParams& p_;
  uint8_t* const smem_;
  const uint32_t base_;
  const MlaBars bars_;
  const int lane_, tid_, row_;  // row_: the first of this thread's two rows
  const uint64_t q_;
  MlaWork work_;
  PhaseBits read_phase_;
  float o_[128], m_[2], l_[2];  // sums of values; row maxima of the raw scores; row sums of own weights
  float s_[32];
  int unmasked_tiles_;  // tiles that need no mask

  __device__ __forceinline__ void arrive(uint32_t bar) const {
    if (lane_ < kArrivingLanes) mbar_arrive(bar);
  }
  // Releases a slot: its half of the values, and the weights, have been read.
  __device__ __forceinline__ void release(int slot) {
    arrive(bars_.empty(slot, GROUP)), arrive(bars_.empty(slot, S::kRotated));
    read_phase_.flip(slot);
  }
  __device__ __forceinline__ uint32_t tile_at(int slot) const { return base_ + S::kTiles + slot * S::kTile; }
  __device__ __forceinline__ void wait_full(int slot, int part) const {
    mbar_wait(bars_.full(slot, part), read_phase_.parity(slot));
    if constexpr (!BOXES) fence_proxy_async();
  }

  // Issues Q K^T of the tile in this warpgroup's slot, part by part as they land.
  __device__ __forceinline__ void issue_qk() {
#pragma unroll
    for (int part = 0; part < S::kParts; ++part) {
      wait_full(GROUP, part);
      const uint64_t k = swizzle128_descriptor(warp_uniform(tile_at(GROUP) + part * S::kHalfBytes),
                                               part == S::kRotated ? 1024 : 4096, 16);
      if (part == 0) wgmma_fence_operand(s_);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < (part == S::kRotated ? 4 : 16); ++i)
        Wgmma<T, 64>::ss(s_, q_ + ((part * 4 + (i >> 2)) * S::kColumns >> 4) + (i & 3) * 2,
                         k + ((i >> 2) * 1024 >> 4) + (i & 3) * 2, part > 0 || i > 0);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ uint64_t values_at(int slot) const {
    return swizzle128_descriptor(warp_uniform(tile_at(slot) + GROUP * S::kHalfBytes), 4096, 1024);
  }
  // Issues P V of this warpgroup's tile, with weights in registers, for its columns.
  __device__ __forceinline__ void issue_pv_own(const uint32_t (&weights)[4][4]) {
    wgmma_fence_operand(o_);
    wgmma_fence();
    const uint64_t v = values_at(GROUP);
#pragma unroll
    for (int i = 0; i < 4; ++i) Wgmma<T, 256>::template rs<kMajorMN>(o_, weights[i], v + i * (8192 >> 4), 1);
    wgmma_commit();
  }
  // The same of the other warpgroup's tile, whose weights have replaced its rotated keys.
  __device__ __forceinline__ void issue_pv_other() {
    constexpr int kSlot = GROUP ^ 1;
    const uint64_t w =
        swizzle128_descriptor(warp_uniform(tile_at(kSlot) + S::kRotated * S::kHalfBytes), 1024, 16);
    wgmma_fence_operand(o_);
    wgmma_fence();
    const uint64_t v = values_at(kSlot);
#pragma unroll
    for (int i = 0; i < 4; ++i) Wgmma<T, 256>::template ss<kMajorMN>(o_, w + i * 2, v + i * (8192 >> 4), 1);
    wgmma_commit();
  }
  __device__ __forceinline__ void wait_values(int slot) {
    wgmma_wait<0>();
    wgmma_fence_operand(o_);
    release(slot);
  }

  // Causal mask. tile: from the start of the context.
  __device__ __forceinline__ void mask(int tile) {
    if (tile < unmasked_tiles_) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int seen = work_.position + quotient(work_.row0 + row_ + r * 8, p_.heads, p_.by_heads) + 1 -
                       tile * S::kKeys - (lane_ & 3) * 2;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        float& s = s_[(i >> 1) * 4 + r * 2 + (i & 1)];
        s = (i >> 1) * 8 + (i & 1) < seen ? s : -INFINITY;
      }
    }
  }

  // Online softmax: scores -> weights 2^(scale_log2 (s - m)), in place. factor: rescales the sums so far.
  __device__ __forceinline__ void softmax(float (&factor)[2]) {
    const float scale = p_.scale_log2;
    float row_max[2][4], base[2], sum[2][2] = {};
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      float& m = row_max[i >> 1 & 1][i >> 2 & 3];
      m = i >= 16 || (i & 1) ? fmaxf(m, s_[i]) : s_[i];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r)
      row_max[r][0] = fmaxf(fmaxf(row_max[r][0], row_max[r][1]), fmaxf(row_max[r][2], row_max[r][3]));
#pragma unroll
    for (int step = 1; step <= 2; step *= 2)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        row_max[r][0] = fmaxf(row_max[r][0], __shfl_xor_sync(0xffffffffu, row_max[r][0], step));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float m = fmaxf(row_max[r][0], m_[r]);
      base[r] = m == -INFINITY ? 0.f : __fmul_rn(m, scale);
      factor[r] = row_max[r][0] > m_[r] ? exp2_approx(__fmul_rn(m_[r], scale) - base[r]) : 1.f;
      m_[r] = m;
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      s_[i] = exp2_approx(fmaf(s_[i], scale, -base[i >> 1 & 1]));
      sum[i >> 1 & 1][i & 1] += s_[i];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) l_[r] = fmaf(l_[r], factor[r], sum[r][0] + sum[r][1]);
  }

  // Publishes the row maxima and weights of this warpgroup's tile to the other one.
  __device__ __forceinline__ void publish_weights(uint32_t (&weights)[4][4]) {
    float* const maxima = reinterpret_cast<float*>(smem_ + S::kMaxima) + GROUP * S::kRows;
    if ((lane_ & 3) == 0) maxima[row_] = m_[0], maxima[row_ + 8] = m_[1];
#pragma unroll
    for (int i = 0; i < 16; ++i) weights[i >> 2][i & 3] = packed<T>(s_[2 * i], s_[2 * i + 1]);
    const int row = (tid_ >> 5) * 16 + (lane_ & 15);
    const uint32_t to = tile_at(GROUP) + S::kRotated * S::kHalfBytes + row * 128;
#pragma unroll
    for (int i = 0; i < 4; ++i) stmatrix_x4(to + (((i * 2 + (lane_ >> 4)) ^ (row & 7)) << 4), weights[i]);
    fence_proxy_async();
    bar_arrive(kBarWeights + GROUP, 256);
  }
  // Waits for those of the other one. factor: as in softmax.
  __device__ __forceinline__ void receive_weights(float (&factor)[2]) {
    bar_sync(kBarWeights + (GROUP ^ 1), 256);
    const float* const maxima = reinterpret_cast<const float*>(smem_ + S::kMaxima) + (GROUP ^ 1) * S::kRows;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float m = maxima[row_ + r * 8], base = m == -INFINITY ? 0.f : __fmul_rn(m, p_.scale_log2);
      factor[r] = m > m_[r] ? exp2_approx(__fmul_rn(m_[r], p_.scale_log2) - base) : 1.f;
      l_[r] *= factor[r], m_[r] = m;
    }
    if constexpr (!BOXES) wait_full(GROUP ^ 1, GROUP);  // written by the generic proxy, read by wgmma
  }

  __device__ __forceinline__ void rescale(const float (&factor)[2]) {
    if (__any_sync(0xffffffffu, factor[0] != 1.f || factor[1] != 1.f)) {
#pragma unroll
      for (int i = 0; i < 128; ++i) o_[i] *= factor[i >> 1 & 1];
    }
  }

  // Zeros values past the end of the context: they may be NaN, which a weight of 0 would not remove.
  __device__ __forceinline__ void clear_end(int slot, int i) {
    if (!BOXES || i + 1 < work_.count || (work_.end & (p_.box - 1)) == 0) return;
    if ((work_.first + i + 1) * S::kKeys <= work_.end) return;
    const int from = work_.end % S::kKeys, rest = p_.box - (work_.end & (p_.box - 1));
    const uint32_t half = tile_at(slot) + GROUP * S::kHalfBytes;
#pragma unroll 1
    for (int c = tid_; c < rest * 32; c += 128) {
      const int key = from + (c >> 5), piece = c & 31;
      st_shared(half + (key >> 3) * 4096 + (piece >> 3) * 1024 + (key & 7) * 128 + (piece & 7) * 16,
                make_uint4(0, 0, 0, 0));
    }
    fence_proxy_async();
    bar_sync(kBarGroup + GROUP, 128);
  }

  __device__ __forceinline__ void attend() {
    const int n = work_.count;
    unmasked_tiles_ = (work_.position + quotient(work_.row0, p_.heads, p_.by_heads) + 1) / S::kKeys;
    m_[0] = m_[1] = -INFINITY, l_[0] = l_[1] = 0.f;
#pragma unroll
    for (int i = 0; i < 128; ++i) o_[i] = 0.f;
    float factor[2];
    uint32_t weights[4][4];
    if (n <= GROUP) arrive(bars_.q_empty());
    if constexpr (GROUP == 0) {
#pragma unroll 1
      for (int i = 0; i < n; i += 2) {
        issue_qk();
        wgmma_wait<0>();
        wgmma_fence_operand(s_);
        if (i + 2 >= n) arrive(bars_.q_empty());
        mask(work_.first + i);
        softmax(factor);
        publish_weights(weights);
        rescale(factor);
        clear_end(0, i);
        issue_pv_own(weights);
        if (i + 1 < n) receive_weights(factor);
        wait_values(0);
        if (i + 1 < n) {
          rescale(factor);
          clear_end(1, i + 1);
          issue_pv_other();
          wait_values(1);
        }
      }
    } else {
      int i = 0;
#pragma unroll 1
      for (; i + 1 < n; i += 2) {
        issue_qk();
        wgmma_wait<0>();  // ptxas would place it before rescale() anyway
        wgmma_fence_operand(s_);
        if (i + 3 >= n) arrive(bars_.q_empty());
        receive_weights(factor);
        rescale(factor);
        issue_pv_other();
        mask(work_.first + i + 1);
        softmax(factor);
        publish_weights(weights);
        wait_values(0);
        rescale(factor);
        clear_end(1, i + 1);
        issue_pv_own(weights);
        wait_values(1);
      }
      if (i < n) {
        receive_weights(factor);
        rescale(factor);
        clear_end(0, i);
        issue_pv_other();
        wait_values(0);
      }
    }
  }

  // Epilogue: adds the sums of weights of both warpgroups and writes the rows. phase: which of two buffers in shared
  // memory.
  __device__ __forceinline__ void finish(uint32_t phase) {
    float* const sums = reinterpret_cast<float*>(smem_ + S::kSums) + phase * (2 * S::kRows);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      l_[r] += __shfl_xor_sync(0xffffffffu, l_[r], 1);
      l_[r] += __shfl_xor_sync(0xffffffffu, l_[r], 2);
      if ((lane_ & 3) == 0) sums[GROUP * S::kRows + row_ + r * 8] = l_[r];
    }
    bar_sync(kBarBoth, 256);
    float top[2], by[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_ + r * 8;
      l_[r] += sums[(GROUP ^ 1) * S::kRows + row];
      top[r] = m_[r] == -INFINITY ? -INFINITY : m_[r] * p_.scale_log2;
      by[r] = l_[r] == 0.f ? 0.f : 1.f / l_[r];
      if (GROUP == 0 && (lane_ & 3) == 0 && row < work_.rows) {
        if (work_.slot < 0)
          write_lse(p_, work_, row, top[r], l_[r]);
        else
          reinterpret_cast<float2*>(p_.part_sums)[int64_t(work_.slot) * S::kRows + row] =
              make_float2(top[r], l_[r]);
      }
    }
    const int row0 = (tid_ >> 5) * 16;
    if (work_.slot < 0) {
      if (row0 < work_.rows) write_rows<T>(p_, work_, o_, by, row0, GROUP * S::kHalf);
    } else if (work_.rows > 0) {
      if (row0 < work_.rows && work_.count > 0) write_part(p_, work_, o_, row0, GROUP * S::kHalf);
      arrive_part(p_, work_);
    }
  }
};

template <typename T, bool BOXES>
__device__ __forceinline__ void mla_attention(const MlaParams& p, const CUtensorMap& q_map,
                                              const CUtensorMap& half_map, const CUtensorMap& rotated_map) {
  using S = MlaShape;
  extern __shared__ __align__(1024) uint8_t smem[];
  const uint32_t base = smem_u32_once(smem);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
  const MlaBars bars{base + S::kBars};
  if (threadIdx.x < S::kSlots * S::kParts) {
    const int i = threadIdx.x;
    mbar_init(bars.full(0, i), BOXES ? 1 : 128);
    mbar_init(bars.empty(0, i), (i % S::kParts == S::kRotated ? 8 : 4) * kArrivingLanes);
    if (i == 0) mbar_init(bars.q_full(), 1), mbar_init(bars.q_empty(), 8 * kArrivingLanes);
    fence_mbarrier_init();
  }
  if (threadIdx.x == 32)
    prefetch_tensormap(&q_map), prefetch_tensormap(&half_map), prefetch_tensormap(&rotated_map);
  if (warp >= 8) {
    setmaxnreg_dec<72>();
    if (BOXES && warp > 8) {
      bar_sync(0, S::kThreads);
    } else {
      MlaProducer<BOXES>(p, q_map, half_map, rotated_map, smem, base).run();
      if (threadIdx.x == 256 && atomicAdd(p.counters + kDone, 1u) == gridDim.x - 1)
        p.counters[kTicket] = 0, p.counters[kDone] = 0;  // every CTA has fetched its last range
    }
  } else {
    setmaxnreg_inc<216>();
    bar_sync(0, S::kThreads);
    uint32_t phase;
    MlaWork work;
    if (warp < 4)
      work = MlaConsumer<T, BOXES, 0>(p, smem, base).run(phase);
    else
      work = MlaConsumer<T, BOXES, 1>(p, smem, base).run(phase);
    while (work.kind == kMerge) {
      if ((threadIdx.x & 31) < kArrivingLanes) mbar_arrive(bars.q_empty());
      merge<T>(p, work, smem);
      mbar_wait(bars.q_full(), phase ^= 1);
      work = get_mla_work(smem + S::kWork);
    }
  }
}

}  // namespace gm::mla
#endif
