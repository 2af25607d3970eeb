// Instances of 8-bit products, of linear and of experts: what the entry.h of both define per shape on the device and on
// the host. A source defines GM_NAME (prefix of kernel names), GM_TYPE (E4m3, Int8) and GM_BLOCKS (scales of 128 x 128
// blocks).
#pragma once
#include "gm_cuda.h"
#include "params.h"

// K(rows of operand A, rows of operand B, whether A is x, warpgroups, blocks of 64 rows of each, CTAs of a
// multiprocessor)
#define GM_THREADS(warpgroups, columns) ((warpgroups) * 128 + ((columns) >= 96 ? 128 : 32))
#define GM_JOIN3(a, b, c, d) a##_##b##x##c##x##d
#define GM_NAMED(a, b, c, d) GM_JOIN3(a, b, c, d)

#ifdef __CUDACC__

// PRODUCT: a function template over type and shape; PARAMS: its parameters.
#define GM_W8A8_KERNEL(PRODUCT, PARAMS, rows, columns, plain, warpgroups, halves, ctas)                  \
  extern "C" __global__ void __launch_bounds__(GM_THREADS(warpgroups, columns), ctas)                    \
      GM_NAMED(GM_NAME, rows, columns, plain)(const __grid_constant__ PARAMS p,                          \
                                              const __grid_constant__ CUtensorMap w,                     \
                                              const __grid_constant__ CUtensorMap x) {                   \
    PRODUCT<gm::w8a8::GM_TYPE, gm::w8a8::Shape<warpgroups, halves, columns, plain, GM_BLOCKS>>(p, w, x); \
  }

#else

namespace gm::w8a8 {

struct Instance {
  int rows, columns, plain, threads, ctas, slot_bytes, epilogue_bytes;
  CudaKernel kernel;
  int tile_n() const { return plain ? columns : rows; }
  int tile_m() const { return plain ? rows : columns; }
};

// Bytes of Shape::kEpilogue of all warpgroups.
constexpr int epilogue_bytes(int rows, int columns, int warpgroups, bool plain) {
  const int tokens = plain ? rows / warpgroups : columns;
  return warpgroups * ((tokens < 64 ? tokens : 64) * 128 + columns * 8) + rows * 8;
}

#define GM_STRING(text) #text
#define GM_TEXT(text) GM_STRING(text)
#define GM_W8A8_INSTANCE(rows, columns, plain, warpgroups, halves, ctas)                       \
  {rows,                                                                                       \
   columns,                                                                                    \
   plain,                                                                                      \
   GM_THREADS(warpgroups, columns),                                                            \
   ctas,                                                                                       \
   (rows + columns) * gm::w8a8::kBlockK + (GM_BLOCKS ? (plain ? rows : columns) * 4 : 0) + 16, \
   gm::w8a8::epilogue_bytes(rows, columns, warpgroups, plain),                                 \
   {GM_CUBIN, GM_TEXT(GM_NAMED(GM_NAME, rows, columns, plain))}},

template <int COUNT>
Instance* find(Instance (&all)[COUNT], int rows, int columns, int plain) {
  for (Instance& i : all)
    if (i.rows == rows && i.columns == columns && i.plain == plain) return &i;
  return nullptr;
}

// Whether `ctas` CTAs of `smem` bytes fit a multiprocessor of 228 KB, of which each CTA reserves 1 KB.
inline bool fits(const Instance& one, int smem, int ctas) {
  constexpr int kMaxShared = 227 * 1024;
  return ctas >= 1 && ctas <= one.ctas && smem <= kMaxShared && (smem + 1024) * ctas <= kMaxShared + 1024;
}

// 8-bit values [rows, k] in boxes of `box` rows of 128. read_once: they are read once, or little more, so that the speed
// of the memory limits the product.
inline int bytes_map(CUtensorMap* map, const void* base, uint64_t k, uint64_t rows, uint64_t ld, unsigned box,
                     bool read_once = false) {
  return rows_map(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, base, k, rows, ld, kBlockK, box,
                  read_once ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

}  // namespace gm::w8a8

#endif
