// Experts of dense weights for Hopper on a CPU, with their entry, for test_grouped_dense_fibers.py.
#define GM_OTHER_BOXES
#include "wgmma_fibers.h"

#include <algorithm>
#include <string_view>

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
inline void tma_load(uint32_t dst, const void* map, int x, int y, uint32_t bar) {
  tma_box<2>(dst, map, {x, y}, bar);
}
inline void tma_load(uint32_t dst, const void* map, int x, int y, int z, uint32_t bar) {
  tma_box<3>(dst, map, {x, y, z}, bar);
}
inline void tma_load(uint32_t dst, const void* map, int x, int y, int z, int w, int u, uint32_t bar) {
  tma_box<5>(dst, map, {x, y, z, w, u}, bar);
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

inline void store_16(void* to, uint4 words) { std::memcpy(to, &words, 16); }
template <int RANKS>
void tma_load_to_all(uint32_t dst, const void* map, int x, int y, uint32_t bar) {
  for (int rank = 0; rank < RANKS; ++rank) tma_load(mapa(dst, rank), map, x, y, mapa(bar, rank));
}
inline void mbar_arrive_at_rank(uint32_t bar, int rank) { mbar_arrive(mapa(bar, rank)); }

namespace dense {

constexpr int kShared = 227 << 10;

}  // namespace dense

}  // namespace gm

#include "gm_cuda.h"  // of which a device sees nothing
#include "moe/grouped_linear/dense_sm90/product.cuh"

// What gm_cuda.h has for the host.
#define GM_CUDA_ARGS(name, Struct) extern "C" int name
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
struct Call {
  const dense::Params* p;
  const CUtensorMap *w, *x;
  unsigned threads, smem;  // threads: of a cluster
  bool spilled;            // written past the shared memory of the launch
};
struct CudaKernel {
  const void* cubin;
  const char* name;
  int launch(int, void*, const Launch& shape, void** arguments);
};

}  // namespace gm

#undef __CUDACC__
#define GM_ENTRY grouped_dense_on_cpu
#define GM_NAME(rest) rest
#define GM_TYPE __nv_bfloat16
#define GM_BF16 1
#include "moe/grouped_linear/dense_sm90/entry.h"

namespace {

template <class S>
void kernel(void* parameters) {
  gm::Call& call = *static_cast<gm::Call*>(parameters);
  uint8_t* const smem = static_cast<uint8_t*>(gm::shared());
  if (gm::fibers::current == 0) gm::fibers::clear(int(call.threads));
  if (gm::thread() == 0) std::memset(smem, 0xff, gm::dense::kShared);  // NaN
  gm::cluster_sync();
  gm::dense::product<__nv_bfloat16, S>(*call.p, *call.w, *call.x, smem);
  gm::block_sync();
  if (gm::thread() == 0)
    call.spilled |=
        std::any_of(smem + call.smem, smem + gm::dense::kShared, [](uint8_t byte) { return byte != 0xff; });
}

struct Row {
  std::string_view name;
  void (*run)(void*);
};
#define GM_ROW(mt, blocks, groups, slices, cluster, ctas, ...)        \
  {GM_TEXT(GM_NAME(mt##x##blocks##x##groups##x##slices##x##cluster)), \
   kernel<GM_SHAPE(mt, blocks, groups, slices, cluster, ctas, __VA_ARGS__)>},
constexpr Row kRows[] = {GM_SHAPES(GM_ROW)};

}  // namespace

int gm::CudaKernel::launch(int, void*, const Launch& shape, void** arguments) {
  Call call{static_cast<dense::Params*>(arguments[0]),
            static_cast<CUtensorMap*>(arguments[1]),
            static_cast<CUtensorMap*>(arguments[2]),
            shape.block * shape.cluster,
            shape.smem,
            false};
  for (const Row& row : kRows)
    if (row.name == name) {
      if (!launch_grid(row.run, &call, int(shape.grid_x), int(shape.block), dense::kShared, 1,
                       int(shape.cluster)))
        return GM_E_HANGS;
      return call.spilled ? GM_E_MEMORY : GM_OK;
    }
  return GM_E_ARG;
}

// The order of threads. Products happen late in odd ones, copies in those that leave 2 or 3 of 4: a slot that is filled too early is seen where
// copies are early and products late.
extern "C" void set_order(int order) { gm::fibers::order = order; }
