// How a lane reads and decodes a tile of gguf_frag16_v1 into the A operand of mma.sync with scales and offsets applied:
// the interface of operands.cuh. A weight is made in float32, exactly as it is dequantized (a code times a scale of 17
// bits has at most 23), and rounded once to the type of x.
#pragma once
#include "decoders_gguf.cuh"
#include "sm90/ptx.cuh"

#ifdef __CUDACC__
namespace gm {

__device__ __forceinline__ uint32_t rounded_pair(float a, float b, __nv_bfloat16) {
  return packed<__nv_bfloat16>(a, b);
}
__device__ __forceinline__ uint32_t rounded_pair(float a, float b, __half) {
  const __half2 out = __floats2half2_rn(a, b);  // for sm_75 too
  return reinterpret_cast<const uint32_t&>(out);
}

template <typename T, int BITS, int G, bool MINIMUMS, bool FACTORED>
struct GgufOperand : GgufTile<BITS, G, MINIMUMS, FACTORED> {
  using Type = T;
  using Tile = GgufTile<BITS, G, MINIMUMS, FACTORED>;
  static constexpr int kKinds = Tile::kKinds, kHigh = BITS == 4 ? 1 : BITS - 4;
  static constexpr float kFactor = 1.f;
  float2 scale, offset;  // of rows g and g + 8
  struct Part {
    uint32_t q[4], high[kHigh], d[kKinds], scales[FACTORED ? 2 : kKinds * G / 2];
    __device__ __forceinline__ void load(uint32_t tile, int lane, int half) {
      const int g = lane >> 2;
      ld_shared(q, tile + half * 512 + lane * 16);
      if constexpr (BITS > 4) ld_shared(high, tile + kCodeBytes + lane * (kHigh * 8) + half * (kHigh * 4));
      const uint32_t from = tile + Tile::kScales;
      if constexpr (FACTORED) {
        ld_shared(d, from + g * (kKinds * 4)), ld_shared(scales, from + kKinds * 32 + g * 16 + half * 8);
      } else {
#pragma unroll
        for (int kind = 0; kind < kKinds; ++kind)
          ld_shared(reinterpret_cast<uint32_t (&)[G / 2]>(scales[kind * (G / 2)]),
                    from + kind * (G * 32) + g * (G * 4) + half * (G * 2));
      }
    }
  };
  __device__ __forceinline__ void decode(int step, const Part& part, uint32_t (&a)[4], int scales_half) {
    if (step % (8 / G) == 0) {
      const int group = step % 4 * G / 8;  // of the half
      scale = of_group(part, group, 0, scales_half);
      if constexpr (MINIMUMS) offset = of_group(part, group, 1, scales_half);
    }
    uint32_t words[2];
    gguf_bytes<BITS>(part.q[step & 3], part.high[step % 4 * kHigh / 4], step, words[0], words[1]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i & 1, column = i >> 1;
      const float by = row == 0 ? scale.x : scale.y, less = MINIMUMS ? row == 0 ? offset.x : offset.y : 0.f;
      a[i] = rounded_pair(fmaf(code(words[row], column), by, -less),
                          fmaf(code(words[row], column + 2), by, -less), T());
    }
  }

 private:
  // A byte as a float, less the middle of signed codes.
  static __device__ __forceinline__ float code(uint32_t word, int at) {
    constexpr float kMiddle = MINIMUMS ? 0.f : 1 << (BITS - 1);
    return __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7540 + at)) - (8388608.f + kMiddle);
  }
  static __device__ __forceinline__ float2 of_group(const Part& part, int group, int kind, int scales_half) {
    if constexpr (FACTORED)
      return factored_scales<MINIMUMS>(part.d[kind], part.scales[group / 2 * kKinds + kind], group);
    else
      return two_scales<kScaleEither>(part.scales[kind * (G / 2) + group], scales_half);
  }
};

}  // namespace gm
#endif
