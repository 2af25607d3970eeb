// Producer warps of latent attention on Hopper: queries, and pages of the latent cache, to shared memory.
#pragma once
#include "_mla_work_sm90.cuh"
#include "sm90/tma.cuh"

#ifdef __CUDACC__
namespace gm::mla {

struct MlaBars {
  uint32_t base;
  __device__ __forceinline__ uint32_t q_full() const { return base; }
  __device__ __forceinline__ uint32_t q_empty() const { return base + 8; }
  __device__ __forceinline__ uint32_t full(int slot, int part) const {
    return base + 16 + (slot * MlaShape::kParts + part) * 8;
  }
  __device__ __forceinline__ uint32_t empty(int slot, int part) const {
    return full(slot, part) + 16 * MlaShape::kParts;
  }
};

// Phase parity of the barrier of each slot.
struct PhaseBits {
  uint32_t bits = 0;
  __device__ __forceinline__ uint32_t parity(int slot) const { return bits >> slot & 1; }
  __device__ __forceinline__ void flip(int slot) { bits ^= 1u << slot; }
};

// A producer warp: fetches ranges until none is left, then publishes the merges that they need. BOXES: the only one;
// otherwise one of four.
template <bool BOXES>
class MlaProducer {
 public:
  using S = MlaShape;
  __device__ __forceinline__ MlaProducer(const MlaParams& p, const CUtensorMap& q_map,
                                         const CUtensorMap& half_map, const CUtensorMap& rotated_map,
                                         uint8_t* smem, uint32_t base)
      : p_(p),
        q_map_(q_map),
        half_map_(half_map),
        rotated_map_(rotated_map),
        smem_(smem),
        base_(base),
        bars_{base + S::kBars},
        lane_(threadIdx.x & 31),
        warp_(threadIdx.x >> 5 & 3) {}

  __device__ __forceinline__ void run() {
    request_range();
    MlaScheduler scheduler(p_);
    bar_sync(0, S::kThreads);  // barriers are initialized
    uint16_t* const processed = reinterpret_cast<uint16_t*>(smem_ + S::kTaken);
    MlaWork work;
    int seq, ranges = 0;
    while (true) {
      const int range = next_range(ranges);
      if (range >= scheduler.ranges()) break;
      if (warp_ == 0 && lane_ == 0) processed[ranges] = range;
      ++ranges;
      scheduler.start(range);
      while (scheduler.next(work, seq)) {
        const int* const pages = p_.table + seq * p_.table_row;
        if constexpr (BOXES)
          copy_boxes(work, pages);
        else
          copy_rows(work, pages);
      }
      request_range();
    }
    if (warp_ != 0) return;
    __syncwarp();
    for (int i = 0; i < ranges; ++i) {
      scheduler.start(processed[i]);
      while (scheduler.next(work, seq)) {
        if (work.parts == 1) continue;
        work.kind = kMerge;
        publish(work);
      }
    }
    work.kind = kStop;
    publish(work);
  }

 private:
  const MlaParams& p_;
  const CUtensorMap &q_map_, &half_map_, &rotated_map_;
  uint8_t* const smem_;
  const uint32_t base_;
  const MlaBars bars_;
  const int lane_, warp_;
  uint32_t ticket_ = 0, published_ = 0;
  PhaseBits write_phase_;

  // Fetches a range by the atomic counter, not before the copies of the previous range are issued: otherwise CTAs
  // that start early would take the ranges of those that start late.
  __device__ __forceinline__ void request_range() {
    if (warp_ == 0 && lane_ == 0) ticket_ = atomicAdd(p_.counters + kTicket, 1u);
  }
  __device__ __forceinline__ int next_range(int round) {
    if constexpr (BOXES) {
      return static_cast<int>(__shfl_sync(0xffffffffu, ticket_, 0));
    } else {
      volatile uint32_t* const ticket = reinterpret_cast<uint32_t*>(smem_ + S::kTickets) + (round & 1);
      if (warp_ == 0 && lane_ == 0) *ticket = ticket_;
      bar_sync(kBarCopying, 128);
      return static_cast<int>(*ticket);
    }
  }

  // Publishes work, with its queries, to the consumer warpgroups.
  __device__ __forceinline__ void publish(const MlaWork& work) {
    if (warp_ != 0) return;
    mbar_wait(bars_.q_empty(), (published_++ & 1) ^ 1);
    const bool reads = work.kind == kAttend && work.count > 0;
    if (lane_ == 0) {
      put_work(smem_ + S::kWork, work);
      if (reads)
        mbar_arrive_expect_tx(bars_.q_full(), 9 * p_.q_rows * 128);
      else
        mbar_arrive(bars_.q_full());
    }
    __syncwarp();
    // Rows past the end of the sequence are of the next one, or zeros; their results are not written.
    if (reads && lane_ < 9)
      tma_load(base_ + S::kQ + lane_ * S::kColumns, &q_map_, lane_ * 64, work.token * p_.heads + work.row0,
               bars_.q_full());
    __syncwarp();
  }

  // One box per lane.
  __device__ __forceinline__ void copy_boxes(const MlaWork& work, const int* pages) {
    const int first_key = lane_ * p_.box;  // of this lane's box, within the tile
    struct Box {
      int page, group;
    };
    const auto box_of = [&](int i) -> Box {
      const int key = (work.first + i) * S::kKeys + first_key, page = quotient(key, p_.page, p_.by_page);
      // TMA fills zeros past the last block.
      return {first_key < S::kKeys && i < work.count && key < work.end ? pages[page] : p_.blocks,
              (key - page * p_.page) / 8};
    };
    Box next = box_of(0);
    publish(work);
#pragma unroll 1
    for (int i = 0; i < work.count; ++i) {
      const int slot = i & 1;
      const Box box = next;
      next = box_of(i + 1);
      const uint32_t tile = base_ + S::kTiles + slot * S::kTile;
#pragma unroll
      for (int part = 0; part < S::kParts; ++part) {
        const int width = part == S::kRotated ? 1 : 4;  // times 64 elements
        mbar_wait(bars_.empty(slot, part), write_phase_.parity(slot) ^ 1);
        if (lane_ == 0) mbar_arrive_expect_tx(bars_.full(slot, part), width * S::kColumns);
        __syncwarp();
        if (first_key < S::kKeys)
          tma_load(tile + part * S::kHalfBytes + first_key * width * 128,
                   part == S::kRotated ? &rotated_map_ : &half_map_, 0, 0, part * 4, box.group, box.page,
                   bars_.full(slot, part));
        __syncwarp();
      }
      write_phase_.flip(slot);
    }
  }

  // 16 keys per warp, 16 bytes per lane at a time.
  __device__ __forceinline__ void copy_rows(const MlaWork& work, const int* pages) {
    const auto row_of = [&](int i) -> const char* {
      const int key = (work.first + i) * S::kKeys + warp_ * 16 + (lane_ & 15),
                page = quotient(key, p_.page, p_.by_page);
      if (i >= work.count || key >= work.end) return nullptr;
      return static_cast<const char*>(p_.cache) +
             (pages[page] * p_.cache_block + (key - page * p_.page) * p_.cache_slot) * 2;
    };
    const char* next = row_of(0);
    publish(work);
#pragma unroll 1
    for (int i = 0; i < work.count; ++i) {
      const int slot = i & 1;
      const unsigned long long address = reinterpret_cast<unsigned long long>(next);
      next = row_of(i + 1);
#pragma unroll
      for (int part = 0; part < S::kParts; ++part)
        mbar_wait(bars_.empty(slot, part), write_phase_.parity(slot) ^ 1);
      const uint32_t tile = base_ + S::kTiles + slot * S::kTile;
#pragma unroll 2
      for (int j = lane_; j < 16 * 72; j += 32) {  // a row has 72 16-byte chunks
        const int row = j / 72, piece = j - row * 72, columns = piece >> 3, key = warp_ * 16 + row;
        const char* const from = reinterpret_cast<const char*>(__shfl_sync(0xffffffffu, address, row));
        const int part = columns >> 2, width = part == S::kRotated ? 1 : 4;
        const uint32_t to = tile + part * S::kHalfBytes + (key >> 3) * (width * 1024) + (columns & 3) * 1024 +
                            (key & 7) * 128 + (((piece ^ key) & 7) << 4);
        cp_async_16(to, from != nullptr ? from + piece * 16 : p_.cache, from != nullptr ? 16 : 0);
      }
#pragma unroll
      for (int part = 0; part < S::kParts; ++part) cp_async_mbar_arrive(bars_.full(slot, part));
      write_phase_.flip(slot);
    }
  }
};

}  // namespace gm::mla
#endif
