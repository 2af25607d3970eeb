// mma_block_scale (mma_block_scale.cuh) by other instructions, to test kernels where there is no sm_120: each code times its scale is
// rounded to bf16, exactly but at the ends of the range, and multiplied by mma.m16n8k16. The columns are taken in another order, the
// same for both operands.
#pragma once
#include "block_formats.h"
#include "sm90/mma.cuh"

#if defined(__CUDACC__) && defined(GM_BLOCK_SCALE_BY_BF16)
namespace gm {

// The value of a code, e2m1 or e4m3.
template <typename Format>
__device__ __forceinline__ float code_value(uint32_t code) {
  if constexpr (Format::kBits == 4)  // the same bits under an exponent that is too small by 126
    return __uint_as_float((code & 7) << 22 | (code & 8) << 28) * 0x1p126f;
  if ((code & 0x7f) == 0x7f) return __uint_as_float(0x7fc00000);
  return __uint_as_float((code & 0x7f) << 20 | (code & 0x80) << 24) * 0x1p120f;
}
// The value of a scale, e4m3 or e8m0.
template <typename Format>
__device__ __forceinline__ float scale_value(uint32_t byte) {
  if constexpr (Format::kGroup == 16) return code_value<Mxfp8>(byte);
  return __uint_as_float(byte == 0 ? 0x400000u : byte == 255 ? 0x7fc00000u : byte << 23);
}

// Four columns, codes from bit 0 of `codes` on, times a scale, as two pairs.
template <typename Format>
__device__ __forceinline__ void scaled_pairs(uint32_t (&pairs)[2], uint32_t codes, float scale) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t two = codes >> i * 2 * Format::kBits, mask = (1u << Format::kBits) - 1;
    pairs[i] = packed<__nv_bfloat16>(code_value<Format>(two & mask) * scale,
                                     code_value<Format>(two >> Format::kBits & mask) * scale);
  }
}

template <typename Format, int BYTE, int OF_A, int OF_B>
__device__ __forceinline__ void mma_block_scale(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                uint32_t b1, uint32_t a_scales, uint32_t b_scales) {
  constexpr int kPieces = 8 / Format::kBits;  // of four columns, of a register
  const int lane = threadIdx.x & 31, quad = lane & 28, t = lane & 3;
  const uint32_t all = 0xffffffffu, upper = __shfl_sync(all, a_scales, quad + 2 * OF_A),
                 lower = __shfl_sync(all, a_scales, quad + 2 * OF_A + 1),
                 column = __shfl_sync(all, b_scales, quad + OF_B);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // A register's columns, 32 / kBits from t 32 / kBits on of this half, are of one group.
    const int shift = (BYTE + (half * 4 + t) * (32 / Format::kBits) / Format::kGroup) * 8;
    const float scales[3] = {scale_value<Format>(upper >> shift & 255),
                             scale_value<Format>(lower >> shift & 255),
                             scale_value<Format>(column >> shift & 255)};
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      uint32_t of_a[2][2], of_b[2];
#pragma unroll
      for (int row = 0; row < 2; ++row)
        scaled_pairs<Format>(of_a[row], a[half * 2 + row] >> piece * 16, scales[row]);
      scaled_pairs<Format>(of_b, (half ? b1 : b0) >> piece * 16, scales[2]);
      const uint32_t tile[4] = {of_a[0][0], of_a[1][0], of_a[0][1], of_a[1][1]};
      Num<__nv_bfloat16>::mma(d, tile, of_b[0], of_b[1]);
    }
  }
}

}  // namespace gm
#endif
