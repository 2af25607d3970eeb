// Paged attention for any batch on sm_80 with other head sizes: the form of flash.cuh, with rows of shared memory that are longer than a head.
// Heads of 80 and 96 elements have the tiles of heads of 128, without the columns past 96; what is past 80 is zero.
#pragma once
#include "flash.cuh"

namespace gm {

template <bool FEW, int KEYS>
struct FlashShape<96, FEW, KEYS> : FlashShape<128, FEW, KEYS> {};

}  // namespace gm

#ifdef __CUDACC__
namespace gm {

template <typename T, int D, bool CAP, bool FEW>
struct FlashPadded : Flash<T, D, CAP, FEW> {
  using Base = Flash<T, D, CAP, FEW>;
  using S = FlashShape<D, FEW>;
  using Base::Base, Base::base, Base::lane, Base::p, Base::work, Base::smem;
  static constexpr int kTiles = Base::kTiles, kOctets = Base::kOctets, kHeadChunks = D / 8;

  // With zeros past the head.
  __device__ __forceinline__ void copy_queries() const {
    const char* q = static_cast<const char*>(p.q);
#pragma unroll 4
    for (int i = threadIdx.x; i < S::kRows * kHeadChunks; i += S::kThreads) {
      const int row = i / kHeadChunks, c = i % kHeadChunks, query = this->query_of(row);
      const bool exists = row < work.rows && c * 8 < p.head_dim;
      const int64_t from = (work.token + query) * p.q_token +
                           (work.head * p.group + row - query * p.group) * p.q_head + c * 16;
      cp_async_16_if(exists, base + Base::chunk_at(row, c), exists ? q + from : q);
    }
  }

  // Copies the keys or the values of a step to a slot, with zeros where there is no key and past the head.
  __device__ __forceinline__ void copy(bool values, int step, int slot) const {
    if (step < work.stop) {
      const char* all =
          static_cast<const char*>(values ? p.v : p.k) + work.head * (values ? p.v_head : p.k_head);
      const uint32_t to = base + S::kRing + slot * S::kSlot;
      const int64_t* const at = this->places(step, values);
#pragma unroll
      for (int n = 0; n < S::kKeys * kHeadChunks / S::kThreads; ++n) {
        const int i = n * S::kThreads + static_cast<int>(threadIdx.x), row = i / kHeadChunks,
                  c = i % kHeadChunks;
        const int64_t bytes = at[row];
        cp_async_16_if(bytes >= 0 && c * 8 < p.head_dim, to + Base::chunk_at(row, c), all + c * 16 + bytes);
      }
    }
    cp_async_commit();
  }

  __device__ __forceinline__ void run() {
    const bool locates = threadIdx.x < S::kKeys;
    int2 next = make_int2(-1, 0);  // of the step after the next one
    if (locates) {
      this->put_place(work.first, this->place(work.first));
      next = this->place(work.first + 1);
    }
    copy_queries();
    __syncthreads();
    copy(false, work.first, 0);
    const uint32_t keys = base + S::kRing, values = keys + S::kSlot;
#pragma unroll 1
    for (int step = work.first; step < work.stop; ++step) {
      const int key = step * S::kKeys + this->key0;
      bool whole = true;
      const bool some = this->sees(key, whole);
      float s[kTiles][kOctets][4];
      cp_async_wait<0>();
      __syncthreads();  // the keys have landed for all, and all are done with the values before
      if (locates) {
        this->put_place(step + 1, next);
        next = this->place(step + 2);
      }
      copy(true, step, 1);
      if (some) this->scores(s, keys);
      cp_async_wait<0>();
      __syncthreads();  // the same of the values and these keys
      copy(false, step + 1, 0);
      if (some) {
        this->soften(s, key, whole);
        this->add_values(s, values);
      }
    }
    cp_async_wait<0>();
    finish_sums();
  }

  // Sums over the lanes of a row, and writes.
  __device__ __forceinline__ void finish_sums() {
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int by = 1; by <= 2; by *= 2) this->l[i][r] += __shfl_xor_sync(0xffffffffu, this->l[i][r], by);
    if constexpr (FEW)
      this->finish_few();
    else
      this->finish();
  }
};

template <typename T, int D, bool CAP>
__device__ __forceinline__ void paged_flash_padded(const FlashParams& p, const SoftCap<CAP>& cap,
                                                   uint8_t* smem) {
  FlashWork work;
  if (!find_work<D>(p, work)) return;
  if (work.few)
    FlashPadded<T, D, CAP, true>(p, cap, work, smem).run();
  else
    FlashPadded<T, D, CAP, false>(p, cap, work, smem).run();
}

}  // namespace gm
#endif
