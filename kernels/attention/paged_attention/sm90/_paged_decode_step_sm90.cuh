// One step of decode on Hopper by one warp: scores and weights of its keys, then the product with their values.
#pragma once
#include "_paged_decode_copy_sm90.cuh"
#include "attention/sm90/_soft_cap_sm90.cuh"
#include "sm90/mma.cuh"

#ifdef __CUDACC__
namespace gm {

// Accumulators of a warp: rows 8 n + 2 t and the next one; maxima in units of the raw scores.
template <int D, int N>
struct DecodeSums {
  float o[D / 16][N / 8][4], m[N / 8][2], l[N / 8][2];
};

// One step of 16 keys. tile: of this step, keys before values. key: of this lane's first row; limit: keys visible
// to the first query.
template <typename T, int D, int N, bool CAP>
__device__ __forceinline__ void decode_step(DecodeSums<D, N>& sums, uint32_t q, uint32_t tile,
                                            float scale_log2, bool whole, int key, int limit, int window,
                                            uint32_t by_group, const SoftCap<CAP>& cap) {
  using S = DecodeShape<D, N, 2>;
  constexpr int kQRow = S::kQRow;
  const int lane = threadIdx.x & 31, t = lane & 3;
  const uint32_t keys = tile + chunk_offset<S>(lane & 15, lane >> 4),
                 values = tile + S::kTile + chunk_offset<S>((lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
  // The address of chunk 2 i + c of a row, given that of its chunk c of the first two.
  const auto chunks = [](uint32_t at, int i) {
    return S::kColumns ? (at ^ (i & 3) * 32) + (i >> 2) * (S::kStep * 128) : at + i * 32;
  };
  uint32_t weights[N / 8][2];
  float factor[N / 8][2];
  bool grown = false;
  float s[N / 8][2][4] = {};  // even and odd chunks of 16 elements: two chains of dependent products
#pragma unroll
  for (int j = 0; j < D / 16; ++j) {
    uint32_t a[4];
    ldmatrix_x4(a, chunks(keys, j));
#pragma unroll
    for (int n = 0; n < N / 8; n += 2) {
      uint32_t b[4];  // of rows n * 8 on, and of the next 8; N = 8: of the same rows twice
      ldmatrix_x4(
          b, q + (n * 8 + (lane & 7) + (N > 8 ? lane >> 4 : 0) * 8) * kQRow + (lane >> 3 & 1) * 16 + j * 32);
      Num<T>::mma(s[n][j & 1], a, b[0], b[1]);
      if constexpr (N > 8) Num<T>::mma(s[n + 1][j & 1], a, b[2], b[3]);
    }
  }
#pragma unroll
  for (int n = 0; n < N / 8; ++n) {
    float (&c)[4] = s[n][0];
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] += s[n][1][i];
    if constexpr (CAP) {
#pragma unroll
      for (int i = 0; i < 4; ++i) c[i] = cap(c[i]);
    }
    if (!whole) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int seen = limit + static_cast<int>((n * 8 + t * 2 + (i & 1)) * by_group >> 16);
        const int at = key + (i >> 1) * 8;
        if (at >= seen || (window > 0 && at < seen - window)) c[i] = -INFINITY;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float row_max = fmaxf(c[r], c[r + 2]);
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2)
        row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffffu, row_max, lanes));
      const float m = fmaxf(row_max, sums.m[n][r]), base = m == -INFINITY ? 0.f : __fmul_rn(m, scale_log2);
      factor[n][r] = row_max > sums.m[n][r] ? exp2_approx(__fmul_rn(sums.m[n][r], scale_log2) - base) : 1.f;
      grown = grown || row_max > sums.m[n][r];
      sums.m[n][r] = m;
      c[r] = exp2_approx(fmaf(c[r], scale_log2, -base));
      c[r + 2] = exp2_approx(fmaf(c[r + 2], scale_log2, -base));
      sums.l[n][r] = fmaf(sums.l[n][r], factor[n][r], c[r] + c[r + 2]);
    }
    weights[n][0] = movmatrix_trans(packed<T>(c[0], c[1]));
    weights[n][1] = movmatrix_trans(packed<T>(c[2], c[3]));
  }
  if (__any_sync(0xffffffffu, grown)) {
#pragma unroll
    for (int i = 0; i < D / 16; ++i)
#pragma unroll
      for (int n = 0; n < N / 8; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) sums.o[i][n][c] *= factor[n][c & 1];
  }
#pragma unroll
  for (int i = 0; i < D / 16; ++i) {
    uint32_t a[4];
    ldmatrix_x4_trans(a, chunks(values, i));
#pragma unroll
    for (int n = 0; n < N / 8; ++n) Num<T>::mma(sums.o[i][n], a, weights[n][0], weights[n][1]);
  }
}

// Q of a KV head for decode over codes: fp16 operands in registers, each row scaled by a power of two (RowScale),
// and the factors that log2-scale its scores.
template <int D>
struct CodeQueries {
  uint32_t q[D / 16][2];
  float scale[2];  // of rows 2 t and 2 t + 1

  // rows: Q in shared memory. A lane has elements 4 t .. 4 t + 3 of every 16 of row g: codes of keys come
  // four to a word, and the order of the elements is that of both operands.
  __device__ __forceinline__ void load(const DecodeParams& p, const uint8_t* rows, int head) {
    const int g = threadIdx.x >> 2 & 7, t = threadIdx.x & 3;
    const uint8_t* row = rows + g * (D * 2 + 16) + t * 8;
    float largest = 0.f;
#pragma unroll
    for (int j = 0; j < D / 16; ++j) {
      const uint2 raw = *reinterpret_cast<const uint2*>(row + j * 32);
      const float2 a = unpacked(raw.x, p.bf16), b = unpacked(raw.y, p.bf16);
      largest = fmaxf(largest, fmaxf(fmaxf(fabsf(a.x), fabsf(a.y)), fmaxf(fabsf(b.x), fabsf(b.y))));
      q[j][0] = raw.x, q[j][1] = raw.y;
    }
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    const RowScale row_scale(largest);
#pragma unroll
    for (int j = 0; j < D / 16; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 a = unpacked(q[j][h], p.bf16);
        q[j][h] = packed<__half>(a.x * row_scale.factor, a.y * row_scale.factor);
      }
    const float inverse =
        row_scale.inverse * p.score_scale * (p.by_token ? 1.f : p.k_scale[head * p.k_scale_head]);
    scale[0] = __shfl_sync(0xffffffffu, inverse, t * 8),
    scale[1] = __shfl_sync(0xffffffffu, inverse, t * 8 + 4);
  }
};

// As decode_step, for e4m3 codes, which are converted to fp16 in registers. Scales of keys multiply scores. The log2
// of a value's scale is added to the exponent of its weight, so that the largest product is 1 in fp16; the sum of
// the weights, without these scales, is relative to the same maximum. The running maximum is log2-scaled.
template <int D, bool CAP>
__device__ __forceinline__ void decode_step_codes(DecodeSums<D, 8>& sums, const CodeQueries<D>& q,
                                                  uint32_t tile, const float* scales, bool by_token,
                                                  bool whole, int key, int limit, int window,
                                                  uint32_t by_group, const SoftCap<CAP>& cap) {
  using S = DecodeShape<D, 8, 1>;
  constexpr int kHalves = S::kStep / 16, kKeys = S::kStep / 8;  // of the step; keys of a lane
  int lane = threadIdx.x & 31;
  if constexpr (D == 256)
    asm volatile("" : "+r"(lane));  // recompute addresses instead of keeping them in registers
  const int t = lane & 3;
  float s[kHalves][2][4] = {};  // of 16 keys each, of even and odd chunks
#pragma unroll
  for (int j = 0; j < (D + 31) / 32; ++j)
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      uint32_t a[4];
      ldmatrix_x4(a, tile + chunk_offset<S>(h * 16 + (lane & 15), 2 * j + (lane >> 4)));
#pragma unroll
      for (int i = 0; i < 2 && 2 * j + i < D / 16; ++i) {
        const uint2 low = e4m3_to_f16(a[2 * i]), high = e4m3_to_f16(a[2 * i + 1]);
        Num<__half>::mma(s[h][i], {low.x, high.x, low.y, high.y}, q.q[2 * j + i][0], q.q[2 * j + i][1]);
      }
    }
  float raised[kKeys] = {};  // log2 of the scales of values, of keys g + 8 i
  float c[kKeys][2];
#pragma unroll
  for (int i = 0; i < kKeys; ++i)
#pragma unroll
    for (int r = 0; r < 2; ++r)
      c[i][r] = (s[i / 2][0][i % 2 * 2 + r] + s[i / 2][1][i % 2 * 2 + r]) * q.scale[r];
  if (by_token) {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const float of_key = scales[lane / 4 + i * 8];
      raised[i] = fmax_nan(__log2f(scales[S::kStep + lane / 4 + i * 8]), -126.f);
      c[i][0] *= of_key, c[i][1] *= of_key;
    }
  }
  if constexpr (CAP) {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) c[i][0] = cap(c[i][0]), c[i][1] = cap(c[i][1]);
  }
  if (!whole) {
#pragma unroll
    for (int i = 0; i < kKeys; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int seen = limit + static_cast<int>((t * 2 + r) * by_group >> 16), at = key + i * 8;
        if (at >= seen || (window > 0 && at < seen - window)) c[i][r] = -INFINITY;
      }
  }
  float factor[2];
  bool grown = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float row_max = -INFINITY;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) row_max = fmaxf(row_max, c[i][r] + raised[i]);
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2)
      row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffffu, row_max, lanes));
    const float m = fmaxf(row_max, sums.m[0][r]), base = m == -INFINITY ? 0.f : m;
    factor[r] = row_max > sums.m[0][r] ? exp2_approx(sums.m[0][r] - base) : 1.f;
    grown = grown || row_max > sums.m[0][r];
    sums.m[0][r] = m;
    float sum = 0.f;
    if (by_token) {
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        sum += exp2_approx(c[i][r] - base);
        c[i][r] = exp2_approx(c[i][r] + raised[i] - base);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kKeys; ++i) sum += c[i][r] = exp2_approx(c[i][r] - base);
    }
    sums.l[0][r] = fmaf(sums.l[0][r], factor[r], sum);
  }
  uint32_t weights[kHalves][2];
#pragma unroll
  for (int i = 0; i < kKeys; ++i) weights[i / 2][i % 2] = movmatrix_trans(packed<__half>(c[i][0], c[i][1]));
  if (__any_sync(0xffffffffu, grown)) {
#pragma unroll
    for (int i = 0; i < D / 16; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums.o[i][0][e] *= factor[e & 1];
  }
#pragma unroll
  for (int j = 0; j < (D + 31) / 32; ++j)
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      uint32_t a[4];
      ldmatrix_x4_trans(
          a,
          tile + S::kTile + chunk_offset<S>(h * 16 + (lane & 7) + (lane >> 4) * 8, 2 * j + (lane >> 3 & 1)));
#pragma unroll
      for (int i = 0; i < 2 && 2 * j + i < D / 16; ++i) {
        // A word has two elements of two keys; rows g and g + 8 of the product are elements 2 g and 2 g + 1.
        const uint2 low = e4m3_to_f16(__byte_perm(a[i], 0, 0x3120)),
                    high = e4m3_to_f16(__byte_perm(a[i + 2], 0, 0x3120));
        Num<__half>::mma(sums.o[2 * j + i][0], {low.x, low.y, high.x, high.y}, weights[h][0], weights[h][1]);
      }
    }
}

}  // namespace gm
#endif
