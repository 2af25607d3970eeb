// What a warp-specialised kernel of Hopper needs of a GPU beside attention_fibers.h: mbarriers, named barriers, copies of boxes by TMA, products of
// warpgroups from shared memory in the 128-byte swizzle.
//
// Copies and products happen at the earliest or at the latest moment: where they are issued if `order` is even, otherwise where they are waited for.
// What is read or overwritten too early differs between the two.
#pragma once
#include <functional>
#include <map>
#include <utility>

#include "attention_fibers.h"

#define __grid_constant__

struct int4 {
  int x, y, z, w;
};
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

#ifndef GM_OTHER_BOXES  // a source that defines it has tensors of its own, and copies of their boxes
// Rows [rows, heads, dim] of 16-bit elements, of which TMA copies 128 rows of 64 elements of a head. Strides are in elements.
struct CUtensorMap {
  const uint16_t* base;
  int dim, heads, rows;
  int64_t head_stride, row_stride;
};
#endif

inline uint32_t __ballot_sync(uint32_t, bool value) { return gm::ballot(value); }
inline int __ffs(uint32_t value) { return __builtin_ffs(int(value)); }
inline int atomicAdd(int* at, int by) { return gm::atomic_add(at, by); }

namespace gm {
namespace fibers {

struct Mbarrier {
  int count, pending, bytes = 0;
  uint32_t phase = 0;
  std::vector<std::function<void()>> copies;  // that complete on it
  void settle() {
    if (pending == 0 && bytes == 0) ++phase, pending = count;
  }
};
struct NamedBarrier {
  int arrived = 0;
  long turn = 0;
};
inline std::map<uint32_t, Mbarrier> mbarriers;
inline std::map<int, NamedBarrier> named;
inline std::vector<std::deque<std::vector<std::function<void()>>>> products;  // of each thread: its groups
inline std::map<uint64_t, long> boxes;                                        // copies from each tensor

// The same address with the rank of this CTA, if it has none.
inline uint32_t of_rank(uint32_t address) {
  return address >> kRank ? address : address | uint32_t(cluster_rank() + 1) << kRank;
}

inline bool late() { return order % 2 != 0; }
inline void progress() { ++all[current].steps; }  // a thread did something, which `run` looks for
inline void clear(int threads) {
  mbarriers.clear(), named.clear(), products.assign(threads, {});
  for (auto& groups : products) groups.emplace_back();
}

}  // namespace fibers

inline void griddepcontrol_launch_dependents() {}
template <int REGISTERS>
void setmaxnreg_dec() {}
template <int REGISTERS>
void setmaxnreg_inc() {}
inline uint32_t smem_u32_once(const void* at) { return smem_u32(at); }
inline uint32_t warp_uniform(uint32_t v) {
  return of_warp(v, [](auto given) { return uint32_t(given(0)); });
}
inline void fence_proxy_async() {}
inline void prefetch_tensormap(const void*) {}
inline uint32_t opaque_zero() { return 0; }
inline void st_shared(uint32_t to, uint4 v) { std::memcpy(fibers::memory_at(to), &v, 16); }

constexpr int kArrivingLanes = 1;
inline void mbar_init(uint32_t bar, uint32_t count) {
  fibers::mbarriers[fibers::of_rank(bar)] = {int(count), int(count)};
}
inline void fence_mbarrier_init() {}
inline void mbar_arrive(uint32_t bar) {
  fibers::Mbarrier& b = fibers::mbarriers.at(fibers::of_rank(bar));
  --b.pending, fibers::progress();
  b.settle();
}
inline void mbar_arrive_expect_tx(uint32_t bar, uint32_t bytes) {
  fibers::mbarriers.at(fibers::of_rank(bar)).bytes += int(bytes);
  mbar_arrive(bar);
}
inline void mbar_wait(uint32_t bar, uint32_t parity) {
  fibers::Mbarrier& b = fibers::mbarriers.at(fibers::of_rank(bar));
  while ((b.phase & 1) == parity) {
    for (const auto& copy : std::exchange(b.copies, {})) copy();
    if ((b.phase & 1) == parity) fibers::yield();
  }
  fibers::progress();
}

inline void bar_arrive(int id, int threads) {
  fibers::meet_warp();
  fibers::NamedBarrier& b = fibers::named[cluster_rank() * 16 + id];
  fibers::progress();
  if (++b.arrived == threads) b.arrived = 0, ++b.turn;
}
inline void bar_sync(int id, int threads) {
  const fibers::NamedBarrier& b = fibers::named[cluster_rank() * 16 + id];
  const long turn = b.turn;
  bar_arrive(id, threads);
  while (b.turn == turn) fibers::yield();
}

inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 3 & 0x70); }
#ifndef GM_OTHER_BOXES
inline void tma_load(uint32_t dst, const CUtensorMap* map, int x, int head, int row, uint32_t bar) {
  const auto copy = [=] {
    for (int r = 0; r < 128; ++r)
      for (int c = 0; c < 64; ++c) {
        const bool exists = x + c < map->dim && head < map->heads && row + r >= 0 && row + r < map->rows;
        const uint16_t value =
            exists ? map->base[(row + r) * map->row_stride + head * map->head_stride + x + c] : 0;
        std::memcpy(fibers::memory_at(swizzled(dst + r * 128 + c * 2)), &value, 2);
      }
    fibers::Mbarrier& b = fibers::mbarriers.at(fibers::of_rank(bar));
    b.bytes -= 128 * 128;
    b.settle();
  };
  ++fibers::boxes[reinterpret_cast<uint64_t>(map)];
  if (fibers::late())
    fibers::mbarriers.at(fibers::of_rank(bar)).copies.push_back(copy);
  else
    copy();
}
#endif

// Products of warpgroups, whose descriptors are the kernel's.
enum Major : int { kMajorK, kMajorMN };
inline uint64_t swizzle128_descriptor(uint32_t address, uint32_t stride = 1024, uint32_t leading = 16) {
  return uint64_t(stride >> 4) << 32 | uint64_t(leading >> 4) << 16 | (address & 0x3ffff) >> 4;
}
inline void wgmma_fence() {}
template <int N>
void wgmma_fence_operand(float (&)[N]) {}
inline void wgmma_commit() { fibers::products[fibers::current].emplace_back(); }
template <int PENDING>
void wgmma_wait() {
  auto& groups = fibers::products[fibers::current];
  for (; groups.size() > PENDING + 1; groups.pop_front())
    for (const auto& product : groups.front()) product();
  fibers::meet_warp();
}

template <typename T, int N>
struct Wgmma {
  // 16 elements of a matrix in shared memory along K: of a row of a K-major one, which are two pieces of 16 bytes, or of column `i` of an
  // MN-major one.
  static void elements(float (&to)[16], uint64_t d, int i, bool by_column) {
    const uint32_t address = uint32_t(d & 0x3fff) << 4, leading = uint32_t(d >> 16 & 0x3fff) << 4,
                   stride = uint32_t(d >> 32 & 0x3fff) << 4;
    uint16_t bits[16];
    if (by_column)
      for (int k = 0; k < 16; ++k)
        std::memcpy(bits + k,
                    fibers::memory_at(
                        swizzled(address + i / 64 * leading + k / 8 * stride + k % 8 * 128 + i % 64 * 2)),
                    2);
    else
      for (int k = 0; k < 16; k += 8)
        std::memcpy(bits + k, fibers::memory_at(swizzled(address + i / 8 * stride + i % 8 * 128 + k * 2)),
                    16);
    for (int k = 0; k < 16; ++k) to[k] = Num<T>::half(bits[k], 0);
  }
  static void issue(std::function<void()> product) {
    if (fibers::late())
      fibers::products[fibers::current].back().push_back(product);
    else
      product();
  }
  static void add(float* d, const float (&a)[2][16], uint64_t b, int scale_d, bool by_column) {
    const int lane = fibers::current % 32;
    for (int i = 0; i < N / 2; i += 4)
      for (int c = 0; c < 2; ++c) {
        float column[16];
        elements(column, b, i * 2 + lane % 4 * 2 + c, by_column);
        for (int r = 0; r < 2; ++r) {
          float sum = scale_d ? d[i + r * 2 + c] : 0.f;
          for (int k = 0; k < 16; ++k) sum += a[r][k] * column[k];
          d[i + r * 2 + c] = sum;
        }
      }
  }
  template <Major B = kMajorK>
  static void ss(float (&d)[N / 2], uint64_t a, uint64_t b, int scale_d) {
    float* const to = d;
    const int row = thread() % 128 / 32 * 16 + thread() % 32 / 4;
    issue([=] {
      float rows[2][16];
      for (int r = 0; r < 2; ++r) elements(rows[r], a, row + r * 8, false);
      add(to, rows, b, scale_d, B == kMajorMN);
    });
  }
  template <Major B = kMajorK>
  static void rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int scale_d) {
    float* const to = d;
    const int quad = fibers::current / 4 * 4;
    for (int i = 0; i < 4; ++i) fibers::registers[fibers::current][i] = a[i];
    warp_sync();
    std::array<float, 32> rows;
    for (int r = 0; r < 2; ++r)
      for (int k = 0; k < 16; ++k)
        rows[r * 16 + k] = Num<T>::half(fibers::registers[quad + k % 8 / 2][r + k / 8 * 2], k & 1);
    warp_sync();
    issue([=] {
      float given[2][16];
      std::memcpy(given, rows.data(), sizeof given);
      add(to, given, b, scale_d, B == kMajorMN);
    });
  }
};

}  // namespace gm
