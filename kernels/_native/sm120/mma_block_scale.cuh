// mma.sync of a warp on codes with a scale per group of columns, for sm_120 and sm_121.
//
// Codes lie in registers as those of mma.m16n8k32 on bytes do: lane 4 g + t has of rows g and g + 8 of A, and of column g of B, the bytes
// 4 t to 4 t + 3 of the first 16 bytes, then of the last 16. Four scales of a row follow each other in a register of one lane: for row
// r of A lane 4 (r % 8) + r / 8 + 2 OF_A, for column c of B lane 4 c + OF_B. So one register of a warp has the scales of two tiles of A, or of
// four of B, and OF_A and OF_B name the tile. The scales of the instruction begin at byte BYTE.
//
// GM_BLOCK_SCALE_BY_BF16 compiles the same function for GPUs that lack the instruction, to run what surrounds it there.
#pragma once
#include "block_formats.h"
#include "mma_block_scale_by_bf16.cuh"

#if defined(__CUDACC__) && !defined(GM_BLOCK_SCALE_BY_BF16)
#include <cstdint>

namespace gm {

#define GM_MMA_BLOCK_SCALE(SHAPE, KIND, TYPES)                                                             \
  asm("mma.sync.aligned." SHAPE ".row.col." KIND ".f32." TYPES                                             \
      " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, %10, {%11, %12}, %13, {%11, %14};" \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                     \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(a_scales), "n"(BYTE), "n"(OF_A), \
        "r"(b_scales), "n"(OF_B))

// d += a b, with codes times their scales, sums in float32.
template <typename Format, int BYTE, int OF_A, int OF_B>
__device__ __forceinline__ void mma_block_scale(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                uint32_t b1, uint32_t a_scales, uint32_t b_scales) {
  static_assert(BYTE % BlockSlot<Format>::kStepScales == 0 && BYTE < 4 && OF_A < 2 && OF_B < 4);
  if constexpr (Format::kBits == 8)
    GM_MMA_BLOCK_SCALE("m16n8k32", "kind::mxf8f6f4.block_scale.scale_vec::1X", "e4m3.e4m3.f32.ue8m0");
  else if constexpr (Format::kGroup == 32)
    GM_MMA_BLOCK_SCALE("m16n8k64", "kind::mxf4nvf4.block_scale.scale_vec::2X", "e2m1.e2m1.f32.ue8m0");
  else
    GM_MMA_BLOCK_SCALE("m16n8k64", "kind::mxf4nvf4.block_scale.scale_vec::4X", "e2m1.e2m1.f32.ue4m3");
}
#undef GM_MMA_BLOCK_SCALE

}  // namespace gm
#endif
