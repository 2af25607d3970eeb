// Products of the decode kernels: tiles of W in shared memory as the A operand of mma.m16n8k16, x as the B
// operand, so that the 16-wide side is N and the 8-wide side is M. At M = 1 seven eighths of the products are
// wasted, but the tensor core is idle anyway and the float units do not become the limit.
#pragma once
#include "_weight_tiles_sm90.cuh"

#ifdef __CUDACC__
namespace gm {

// The B fragments of 128 k, from a slot of x: two halves of 64 k, each of rows of 128 bytes in the tensor
// cores' 128-byte swizzle. row: the address of each fragment's row of the lane in the first half; swizzle: 16
// times its chunk exclusive-or that row.
template <int NT>
__device__ __forceinline__ void load_x(uint4 (&x)[NT][4], const uint32_t (&row)[NT],
                                       const uint32_t (&swizzle)[NT], uint32_t half_bytes) {
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t at = row[n] + (j >> 1) * half_bytes + (swizzle[n] ^ (j & 1) * 64);
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                   : "=r"(x[n][j].x), "=r"(x[n][j].y), "=r"(x[n][j].z), "=r"(x[n][j].w)
                   : "r"(at)
                   : "memory");
    }
}

// Adds the finished sums of a group (G = 0: of the tile) to the accumulators, scaled.
template <typename W, int CH, int NT>
__device__ __forceinline__ void add_sums(float (&acc)[NT][4], const float (&part)[CH][NT][4], const W& w,
                                         int group, const W4Params& p) {
  float s[2] = {1.f, 1.f};
  if constexpr (W::kGroups > 0) {
    const float2 both = w.scale(group, p);
    s[0] = both.x, s[1] = both.y;
  }
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float sum = CH == 2 ? part[0][n][i] + part[CH - 1][n][i] : part[0][n][i];
      acc[n][i] = W::kGroups > 0 ? acc[n][i] + s[i >> 1] * sum : sum;
    }
}

// Adds the products of TILES tiles by x to the accumulators. What it returns depends on every word that was
// loaded: an arrival at a barrier may overtake loads that it does not depend on.
template <typename T, typename W, int NT, int TILES>
__device__ __forceinline__ uint32_t multiply_tiles(float (*acc)[NT][4], const uint8_t* from,
                                                   const uint4 (&x)[NT][4], int lane, const W4Params& p) {
  // Tiles at a time (fp4 is 1 to 2 % faster with two, the others need fewer registers with one); chains of
  // products a tile; steps a group.
  constexpr int G = W::kGroups, TP = G == 0 ? 2 : 1, CH = NT == 1 && G <= 1 ? 2 : 1,
                kEvery = G > 1 ? 8 / G : 8;
  uint32_t any = 0;
#pragma unroll
  for (int c0 = 0; c0 < TILES; c0 += TP) {
    const int tiles = min(TILES - c0, TP);
    float (*to)[NT][4] = acc + c0;
    W w[TP];
    float part[TP][CH][NT][4];
#pragma unroll
    for (int c = 0; c < tiles; ++c) w[c].load(from + (c0 + c) * W::kBytes, lane), any |= w[c].any();
#pragma unroll
    for (int step = 0; step < 8; ++step) {
#pragma unroll
      for (int c = 0; c < tiles; ++c) {
        if (step % kEvery == 0) {  // sums start anew
#pragma unroll
          for (int h = 0; h < CH; ++h)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
              for (int i = 0; i < 4; ++i) part[c][h][n][i] = G == 0 && h == 0 ? to[c][n][i] : 0.f;
        }
        uint32_t a[4];
        w[c].pairs(step, a);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          const uint4& b = x[n][step >> 1];
          float (&sum)[4] = part[c][step % CH][n];
          Num<T>::mma(sum, a, step & 1 ? b.z : b.x, step & 1 ? b.w : b.y, sum);
        }
        if (step % kEvery == kEvery - 1) add_sums<W, CH>(to[c], part[c], w[c], step / kEvery, p);
      }
    }
  }
  return any;
}

// Leaves a warp's accumulators where finish_sums looks for them.
template <typename W, int NT, int RT>
__device__ __forceinline__ void leave_sums(const float (&acc)[RT][NT][4], uint8_t* smem, int warp, int lane) {
  float4* to = reinterpret_cast<float4*>(smem) + warp * (RT * NT * 32) + lane;
#pragma unroll
  for (int r = 0; r < RT; ++r)
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const float (&sum)[4] = acc[r][n];
      to[(r * NT + n) * 32] =
          make_float4(sum[0] * W::kFactor, sum[1] * W::kFactor, sum[2] * W::kFactor, sum[3] * W::kFactor);
    }
}

}  // namespace gm
#endif
