// What a kernel of Hopper needs with its entry on a CPU, beside wgmma_fibers.h: copies of boxes of any tensor by TMA, transposed stores of
// matrices, other CTAs' shared memory, and what gm_cuda.h has for the host.
#pragma once
#define GM_OTHER_BOXES
#include "wgmma_fibers.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <string_view>
#include <vector>

#define blockDim (gm::fibers::Index{gm::threads()})
inline int __popc(uint32_t value) { return __builtin_popcount(value); }

using cuuint64_t = uint64_t;
using cuuint32_t = uint32_t;
enum CUtensorMapDataType { kType };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B };

// Of 16-bit elements, up to five dimensions, the innermost first; strides in bytes, of all dimensions but that one.
struct CUtensorMap {
  const char* base;
  unsigned rank;
  uint64_t sizes[5], strides[5];
  uint32_t box[5];
};

namespace gm {

constexpr int kShared = 227 << 10;  // of a CTA, at most

// A box to shared memory, in the 128-byte swizzle; zeros past the tensor.
template <int RANK>
void tma_box(uint32_t dst, const void* from, const int (&at)[RANK], uint32_t bar) {
  const CUtensorMap& map = *static_cast<const CUtensorMap*>(from);
  dst = fibers::of_rank(dst), bar = fibers::of_rank(bar);
  if (map.rank != RANK) __builtin_trap();
  const auto copy = [=, &map] {
    int index[RANK] = {};
    uint32_t to = dst, bytes = 0;
    for (bool left = true; left;) {
      uint64_t offset = 0;
      bool exists = true;
      for (int d = 0; d < RANK; ++d) {
        const int64_t place = int64_t(at[d]) + index[d];
        exists &= place >= 0 && place < int64_t(map.sizes[d]);
        offset += uint64_t(place) * (d ? map.strides[d - 1] : 2);
      }
      uint16_t value = 0;
      if (exists) std::memcpy(&value, map.base + offset, 2);
      std::memcpy(fibers::memory_at(swizzled(to)), &value, 2);
      to += 2, bytes += 2, left = false;
      for (int d = 0; d < RANK && !left; ++d) {
        if (++index[d] < int(map.box[d]))
          left = true;
        else
          index[d] = 0;
      }
    }
    fibers::Mbarrier& b = fibers::mbarriers.at(bar);  // that it has may be told only later
    b.bytes -= int(bytes);
    b.settle();
  };
  ++fibers::boxes[reinterpret_cast<uint64_t>(from)];
  if (fibers::order / 2 % 2)
    fibers::mbarriers.at(bar).copies.push_back(copy);
  else
    copy();
}
// Bytes in a row, as TMA copies them.
inline void bulk_load(uint32_t dst, const void* from, uint32_t bytes, uint32_t bar, uint64_t) {
  if (dst % 16 || uintptr_t(from) % 16 || bytes % 16 || bytes == 0) __builtin_trap();
  dst = fibers::of_rank(dst), bar = fibers::of_rank(bar);
  const auto copy = [=] {
    std::memcpy(fibers::memory_at(dst), from, bytes);
    fibers::Mbarrier& b = fibers::mbarriers.at(bar);
    b.bytes -= int(bytes);
    b.settle();
  };
  if (fibers::order / 2 % 2)
    fibers::mbarriers.at(bar).copies.push_back(copy);
  else
    copy();
}
inline void tma_load(uint32_t dst, const void* map, int x, int y, uint32_t bar) {
  tma_box<2>(dst, map, {x, y}, bar);
}
inline void tma_load(uint32_t dst, const void* map, int x, int y, int z, uint32_t bar) {
  tma_box<3>(dst, map, {x, y, z}, bar);
}
inline void tma_load(uint32_t dst, const void* map, int x, int y, int z, int w, uint32_t bar) {
  tma_box<4>(dst, map, {x, y, z, w}, bar);
}
inline void tma_load(uint32_t dst, const void* map, int x, int y, int z, int w, int u, uint32_t bar) {
  tma_box<5>(dst, map, {x, y, z, w, u}, bar);
}

// What this thread has copied by cp.async so far.
inline void cp_async_mbar_arrive(uint32_t bar) {
  auto& groups = fibers::copies[fibers::current];
  bar = fibers::of_rank(bar);
  const auto copy = [=, groups = std::exchange(groups, {{}})] {
    for (const auto& group : groups)
      for (const fibers::Copy& one : group) {
        std::memset(fibers::memory_at(one.to), 0, one.all);
        std::memcpy(fibers::memory_at(one.to), one.from, one.bytes);
      }
    mbar_arrive(bar);
  };
  if (fibers::order / 2 % 2)
    fibers::mbarriers.at(bar).copies.push_back(copy);
  else
    copy();
}

// A box from shared memory, in the 128-byte swizzle, without what is past the tensor. In orders in which copies are late it is read when its thread
// waits for that.
inline std::map<int, std::vector<std::function<void()>>> stores;  // by thread
inline long stored_boxes = 0;
inline void tma_store(const void* to, uint32_t src, int x, int y, int z, unsigned rank = 3) {
  const CUtensorMap& map = *static_cast<const CUtensorMap*>(to);
  if (map.rank != rank || src % 1024) __builtin_trap();
  ++stored_boxes;
  const auto copy = [=, &map] {
    const uint32_t rows = map.box[1], sheets = rank > 2 ? map.box[2] : 1;
    for (uint32_t row = 0; row < rows * sheets; ++row)
      for (uint32_t column = 0; column < map.box[0]; ++column) {
        const uint64_t at_x = uint64_t(x) + column, at_y = uint64_t(y) + row % rows,
                       at_z = uint64_t(z) + row / rows;
        if (at_x < map.sizes[0] && at_y < map.sizes[1] && (rank == 2 || at_z < map.sizes[2]))
          std::memcpy(const_cast<char*>(map.base) + (rank > 2 ? at_z * map.strides[1] : 0) +
                          at_y * map.strides[0] + at_x * 2,
                      fibers::memory_at(swizzled(src + (row * map.box[0] + column) * 2)), 2);
      }
  };
  if (fibers::order / 2 % 2)
    stores[fibers::current].push_back(copy);
  else
    copy();
}
inline void tma_store(const void* to, uint32_t src, int x, int y) { tma_store(to, src, x, y, 0, 2); }
inline void tma_store_commit() {}
inline void tma_store_wait_read() {
  for (const auto& copy : stores[fibers::current]) copy();
  stores[fibers::current].clear();
}

// Matrices of 8 x 8 elements, whose columns are in four lanes each; the address of row i of matrix m is lane 8 m + i's.
template <int COUNT>
void stmatrix_trans(uint32_t to, const uint32_t (&r)[COUNT]) {
  const int lane = fibers::current % 32;
  of_warp(to, [&](auto given) {
    for (int m = 0; m < COUNT; ++m)
      for (int j = 0; j < 2; ++j) {
        const uint16_t bits = uint16_t(r[m] >> j * 16);
        std::memcpy(fibers::memory_at(uint32_t(given(m * 8 + lane % 4 * 2 + j)) + lane / 4 * 2), &bits, 2);
      }
    return 0;
  });
}
inline void stmatrix_x2_trans(uint32_t to, const uint32_t (&r)[2]) { stmatrix_trans(to, r); }
inline void stmatrix_x4_trans(uint32_t to, const uint32_t (&r)[4]) { stmatrix_trans(to, r); }
// The same of rows in four lanes each.
inline void stmatrix_x4(uint32_t to, const uint32_t (&r)[4]) {
  const int lane = fibers::current % 32;
  of_warp(to, [&](auto given) {
    for (int m = 0; m < 4; ++m)
      std::memcpy(fibers::memory_at(uint32_t(given(m * 8 + lane / 4)) + lane % 4 * 4), &r[m], 4);
    return 0;
  });
}
inline void st_shared(uint32_t to, float4 v) { std::memcpy(fibers::memory_at(to), &v, 16); }
inline void st_shared(uint32_t to, uint16_t v) { std::memcpy(fibers::memory_at(to), &v, 2); }
template <typename T>
T ld_shared(uint32_t from) {
  T v;
  std::memcpy(&v, fibers::memory_at(from), sizeof v);
  return v;
}
inline void ld_shared(float (&v)[4], uint32_t from) { std::memcpy(v, fibers::memory_at(from), 16); }

inline uint32_t mapa(uint32_t address, int rank) { return address | uint32_t(rank + 1) << fibers::kRank; }
template <int RANKS>
void tma_load_to_all(uint32_t dst, const void* map, int x, int y, uint32_t bar) {
  for (int rank = 0; rank < RANKS; ++rank) tma_load(mapa(dst, rank), map, x, y, mapa(bar, rank));
}
inline void mbar_arrive_at_rank(uint32_t bar, int rank) { mbar_arrive(mapa(bar, rank)); }

}  // namespace gm

#include "gm_cuda.h"  // of which a device sees nothing

// What gm_cuda.h has for the host.
#define GM_CUDA_ARGS(name, Struct) extern "C" int name
#define GM_CUDA_CALL(name, Op, ...)  \
  struct name##_options {            \
    __VA_OPT__(int64_t __VA_ARGS__;) \
  };                                 \
  extern "C" int name
#define GM_CUBIN nullptr
enum : int {
  GM_OK = 0,
  GM_E_DTYPE = -1,
  GM_E_SHAPE = -2,
  GM_E_ARG = -5,
  GM_E_MAP = -100,
  GM_E_HANGS = -200,
  GM_E_MEMORY = -300
};

namespace gm {

// As cuTensorMapEncodeTiled refuses them.
inline int tensor_map(CUtensorMap* map, CUtensorMapDataType, unsigned rank, const void* base,
                      const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                      CUtensorMapL2promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  *map = {static_cast<const char*>(base), rank, {}, {}, {}};
  bool fits = uintptr_t(base) % 16 == 0 && box[0] == 64;
  for (unsigned d = 0; d < rank; ++d) {
    map->sizes[d] = sizes[d], map->box[d] = box[d];
    fits &= sizes[d] > 0 && sizes[d] <= uint64_t(1) << 32 && box[d] > 0 && box[d] <= 256;
    if (d + 1 < rank) {
      map->strides[d] = strides[d];
      fits &= strides[d] % 16 == 0 && strides[d] < uint64_t(1) << 40;
    }
  }
  return fits ? GM_OK : GM_E_MAP;
}
inline int rows_map(CUtensorMap* map, CUtensorMapDataType type, const void* base, uint64_t k, uint64_t rows,
                    uint64_t ld, unsigned box_k, unsigned box_rows) {
  const cuuint64_t sizes[] = {k, rows}, strides[] = {ld};
  const cuuint32_t box[] = {box_k, box_rows};
  return tensor_map(map, type, 2, base, sizes, strides, box);
}
inline CUtensorMapDataType float16_type(bool) { return kType; }
constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
inline bool is_aligned(const void* p) { return uintptr_t(p) % 16 == 0; }

struct Launch {
  unsigned grid_x = 1, block = 128, smem = 0, cluster = 1;
  bool pdl = false;
};
struct CudaKernel {
  const void* cubin;
  const char* name;
  int launch(int, void*, const Launch& shape, void** arguments);
};

// A kernel of these parameters, and one that is being executed.
template <typename Params>
struct Program {
  struct Call {
    const Params* p;
    const CUtensorMap *first, *second;
    unsigned threads, smem;  // threads: of a cluster
    bool spilled;            // written past the shared memory of the launch
  };
  std::string_view name;
  void (*run)(void*);
};

// What a thread does. Shared memory is NaN at first.
template <typename Call, typename Body>
void run_thread(void* parameters, const Body& body) {
  Call& call = *static_cast<Call*>(parameters);
  uint8_t* const smem = static_cast<uint8_t*>(shared());
  if (fibers::current == 0) fibers::clear(int(call.threads));
  if (thread() == 0) std::memset(smem, 0xff, kShared);
  cluster_sync();
  body(call, smem);
  block_sync();
  if (thread() == 0)
    call.spilled |= std::any_of(smem + call.smem, smem + kShared, [](uint8_t byte) { return byte != 0xff; });
}

// Launches the program of this name.
template <typename Params, size_t COUNT>
int launch_program(const Program<Params> (&programs)[COUNT], const char* name, const Launch& shape,
                   const Params* p, const void* first, const void* second = nullptr) {
  typename Program<Params>::Call call{p,
                                      static_cast<const CUtensorMap*>(first),
                                      static_cast<const CUtensorMap*>(second),
                                      shape.block * shape.cluster,
                                      shape.smem,
                                      false};
  for (const Program<Params>& one : programs)
    if (one.name == name) {
      if (!launch_grid(one.run, &call, int(shape.grid_x), int(shape.block), kShared, 1, int(shape.cluster)))
        return GM_E_HANGS;
      return call.spilled ? GM_E_MEMORY : GM_OK;
    }
  return GM_E_ARG;
}

}  // namespace gm

// The order of threads. Products happen late in odd ones, copies in those that leave 2 or 3 of 4: a slot that is filled too early is seen where
// copies are early and products late.
extern "C" void set_order(int order) { gm::fibers::order = order; }
