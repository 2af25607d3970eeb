// What the tiles of linear/frag16_sm80/gemm_tile.cuh need of a GPU, for a CPU: every thread of a CTA is a fiber (cluster_fibers.h), CTAs
// follow each other. attention_fibers.h has what attention needs beside.
//
// Copies by cp.async happen when they are waited for, and not before: what is read too early is poison. `fault` plants one fault: 1 = barriers of
// CTAs do nothing, 4 = a wait for copies leaves one group more in flight.
#pragma once
#include <array>
#include <deque>

#include "cluster_fibers.h"

#define __device__
#define __forceinline__ inline
#define __shared__ thread_local  // all fibers are of one thread
#define __CUDACC__

struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct Bf16 {
  uint16_t bits;
};

namespace gm::fibers {
struct Index {
  int x, y = 0;
};
struct Copy {
  uint32_t to;
  const void* from;
  uint32_t bytes, all = 16;
};
inline std::vector<std::deque<std::vector<Copy>>>
    copies;  // of each thread: its groups, the last of which is open
inline std::vector<std::array<uint32_t, 10>> registers;  // of each thread, that its warp reads
inline Index grid{1, 1};
inline char* array =
    nullptr;  // the array of dynamic shared memory, where a kernel declares one; else gm::shared()
constexpr int kRank =
    20;  // bits of an address in shared memory; those above are 0, or one more than the rank of its CTA
inline char* memory_at(uint32_t address) {
  if (array) return array + (address & ((1u << kRank) - 1));
  const int rank = address >> kRank ? int(address >> kRank) - 1 : cluster_rank();
  return static_cast<char*>(shared()) + (rank - cluster_rank()) * int64_t(block_bytes) +
         (address & ((1u << kRank) - 1));
}
}  // namespace gm::fibers

#define threadIdx (gm::fibers::Index{gm::thread()})
#define blockIdx \
  (gm::fibers::Index{int(gm::block()) % gm::fibers::grid.x, int(gm::block()) / gm::fibers::grid.x})
#define gridDim (gm::fibers::grid)

inline void __syncwarp() { gm::warp_sync(); }
inline void __syncthreads() { gm::block_sync(); }
inline void __threadfence() {}
template <typename T>
T __ldcg(const T* from) {
  return *from;
}
template <typename T>
void __stcg(T* to, T value) {
  *to = value;
}
inline uint32_t atomicAdd(uint32_t* at, uint32_t by) { return gm::atomic_add(at, by); }
inline int __shfl_up_sync(uint32_t, int value, int by) { return int(gm::shuffle_up(uint64_t(value), by)); }
inline int __shfl_sync(uint32_t, int value, int from) {
  return gm::of_warp(uint64_t(value), [=](auto given) { return int(given(from)); });
}

namespace gm {

inline uint32_t smem_u32(const void* at) {
  return uint32_t(static_cast<const char*>(at) - fibers::memory_at(0));
}
inline void cp_async_16(uint32_t to, const void* from, uint32_t bytes = 16) {
  fibers::copies[fibers::current].back().push_back({to, from, bytes, 16});
}
inline void cp_async_commit() { fibers::copies[fibers::current].emplace_back(); }
template <int LEFT>
void cp_async_wait() {
  auto& groups = fibers::copies[fibers::current];
  for (const size_t left = LEFT + (fibers::fault == 4) + 1; groups.size() > left; groups.pop_front())
    for (const fibers::Copy& one : groups.front()) {
      std::memset(fibers::memory_at(one.to), 0, one.all);
      std::memcpy(fibers::memory_at(one.to), one.from, one.bytes);
    }
}
template <int L2>
void cp_async_16(uint32_t to, const void* from) {
  cp_async_16(to, from);
}
inline uint32_t word_at(uint32_t address) {
  uint32_t word;
  std::memcpy(&word, fibers::memory_at(address), 4);
  return word;
}
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t from) {
  const int lane = fibers::current % 32;
  of_warp(from, [&](auto given) {
    for (int i = 0; i < 4; ++i) r[i] = word_at(uint32_t(given(i * 8 + lane / 4)) + lane % 4 * 4);
    return 0;
  });
}

template <typename T>
struct Num;
template <typename T>
struct Products {
  // d += a b for 16 x 16 x 8, in the layout of mma.m16n8k16.
  static void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const int base = fibers::current / 32 * 32, lane = fibers::current % 32, g = lane / 4, t = lane % 4;
    auto& own = fibers::registers[fibers::current];
    for (int i = 0; i < 4; ++i) own[i] = a[i];
    own[4] = b0, own[5] = b1;
    warp_sync();
    for (int i = 0; i < 4; ++i) {
      const int row = g + i / 2 * 8, column = 2 * t + i % 2;
      for (int k = 0; k < 16; ++k) {
        const int pair = k % 8 / 2, high = k & 1;
        const uint32_t left = fibers::registers[base + row % 8 * 4 + pair][row / 8 + k / 8 * 2];
        const uint32_t right = fibers::registers[base + column * 4 + pair][4 + k / 8];
        d[i] += Num<T>::half(left, high) * Num<T>::half(right, high);
      }
    }
    warp_sync();
  }
};
template <>
struct Num<Bf16> : Products<Bf16> {
  static float to_float(Bf16 v) { return float_of(int(uint32_t(v.bits) << 16)); }
  static Bf16 round(float v) {
    const uint32_t bits = uint32_t(bits_of(v));
    if (v != v) return {0x7fff};
    return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
  }
  static float half(uint32_t word, int high) { return float_of(int(high ? word & 0xffff0000u : word << 16)); }
};
template <typename T>
uint32_t packed(float low, float high) {
  return Num<T>::round(low).bits | uint32_t(Num<T>::round(high).bits) << 16;
}

// Weights in 16 bits, times FACTOR: a tile of 16 rows x 128 k as it is, rows behind each other.
template <int FACTOR, typename T = Bf16>
struct PlainOperand {
  using Type = T;
  static constexpr int kBytes = 16 * 128 * 2;
  static constexpr float kFactor = 1.f / FACTOR;
  struct Part {
    uint32_t tile;
    int lane;
    void load(uint32_t at, int of_lane, int) { tile = at, lane = of_lane; }
  };
  void decode(int step, const Part& part, uint32_t (&a)[4], int) const {
    for (int i = 0; i < 4; ++i)
      a[i] =
          word_at(part.tile + (part.lane / 4 + i % 2 * 8) * 256 + step * 32 + i / 2 * 16 + part.lane % 4 * 4);
  }
};

// Runs a kernel over a grid; false if threads wait for each other in vain. cluster: CTAs of one, along x.
inline bool launch_grid(void (*kernel)(void*), void* parameters, int grid, int threads, size_t bytes,
                        int high = 1, int cluster = 1) {
  fibers::grid = {grid, high};
  fibers::copies.assign(threads * cluster, {}), fibers::registers.resize(threads * cluster);
  for (auto& groups : fibers::copies) groups.emplace_back();
  return fibers::launch(kernel, parameters, grid * high / cluster, cluster, threads, bytes);
}

}  // namespace gm
