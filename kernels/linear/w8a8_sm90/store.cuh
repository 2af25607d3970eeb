// Epilogue of a tile: accumulators times scales, plus bias and residual, rounded once, stored through shared memory.
#pragma once
#include "scales.cuh"

#ifdef __CUDACC__

namespace gm::w8a8 {

template <typename Sum>
constexpr bool kIntegers = static_cast<Sum>(0.5f) == 0;

__device__ __forceinline__ uint32_t rounded(float low, float high, int half) {
  return half ? packed<__half>(low, high) : packed<__nv_bfloat16>(low, high);
}

// Scales and bias of the epilogue, of a row of x and one of W per thread of a warpgroup: loaded when the tile begins,
// and used when its sums are complete.
template <class S, typename Sum>
struct EpilogueOperands {
  float x_scale = 1.f, w_scale = 1.f, bias = 0.f;
  int offset = 0;
  // n0, m0: first column and row of y of the warpgroup.
  __device__ __forceinline__ EpilogueOperands(const Params& p, int n0, int m0) {
    const int thread = threadIdx.x & 127, m = m0 + thread, n = n0 + thread;
    if (!S::kBlocks && thread < S::kTokens && m < p.m) {
      x_scale = p.x_scale[m];
      if constexpr (kIntegers<Sum>) offset = 128 * p.x_sum[m];  // W is offset by 128
    }
    if (thread < S::kFeatures && n < p.n) {
      if constexpr (!S::kBlocks) w_scale = scale_at(p, n);
      if (p.bias != nullptr) bias = widened(p.bias, n, p.half);
    }
  }
  // Stores them to the warpgroup's table in shared memory.
  __device__ __forceinline__ void store(uint32_t table, int warpgroup) const {
    const int thread = threadIdx.x & 127;
    if (thread < S::kTokens) st_shared(table + S::kTable + thread * 8, x_scale, offset);
    if (thread < S::kFeatures)
      st_shared(table + S::kTable + S::kTokenScales + thread * 8, make_float2(w_scale, bias));
    bar_sync(warpgroup + 1, 128);
  }
};

// Stores COUNT accumulator fragments of 64 rows of A by 8 rows of B, at most S::kChunk tokens. half: which 64 rows of A;
// column: the first row of B, relative to the tile. n0, m0: first column and row of y of the warpgroup.
template <class S, int COUNT, typename Sum>
__device__ __forceinline__ void store_fragments(const Params& p, const Sum* sums, uint32_t table,
                                                const uint8_t* shared, int warpgroup, int n0, int m0,
                                                int half, int column) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, thread = threadIdx.x & 127;
  const int a = half * 64 + warp * 16 + (lane >> 2);
  const int2* tokens = reinterpret_cast<const int2*>(shared + S::kTable);  // scale and offset
  // Scale and bias of each feature.
  const float2* features = reinterpret_cast<const float2*>(shared + S::kTable + S::kTokenScales);
  float v[COUNT][4];
#pragma unroll
  for (int j = 0; j < COUNT; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int in_a = a + (i >> 1) * 8, in_b = column + j * 8 + (lane & 3) * 2 + (i & 1);
      const int2 of_x = tokens[S::kPlain ? in_a : in_b];
      const float2 of_w = features[S::kPlain ? in_b : in_a];
      const float value =
          kIntegers<Sum> ? static_cast<float>(sums[j * 4 + i] - static_cast<Sum>(of_x.y)) : sums[j * 4 + i];
      v[j][i] = (S::kBlocks ? value : value * (__int_as_float(of_x.x) * of_w.x)) + of_w.y;
    }
  if (p.residual != nullptr) {
#pragma unroll
    for (int j = 0; j < COUNT; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int in_a = a + (i >> 1) * 8, in_b = column + j * 8 + (lane & 3) * 2 + (i & 1);
        const int m = m0 + (S::kPlain ? in_a : in_b), n = n0 + (S::kPlain ? in_b : in_a);
        if (m < p.m && n < p.n) v[j][i] += widened(p.residual, static_cast<int64_t>(m) * p.n + n, p.half);
      }
  }
  uint32_t packed[COUNT][2];
  const auto pack = [&](int half) {
#pragma unroll
    for (int j = 0; j < COUNT; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) packed[j][h] = rounded(v[j][h * 2], v[j][h * 2 + 1], half);
  };
  if (p.half)
    pack(1);
  else
    pack(0);
  // A row of the table is one token, of 8 16-byte chunks. Where operand A is W the matrices are transposed.
#pragma unroll
  for (int j = 0; j < COUNT; ++j) {
    const int matrix = lane >> 3 & 1;
    const int row = (S::kPlain ? warp * 16 + matrix * 8 : j * 8) + (lane & 7);
    const uint32_t to = table + row * 128 + (((S::kPlain ? j : warp * 2 + matrix) ^ (row & 7)) << 4);
    if constexpr (S::kPlain)
      stmatrix_x2(to, packed[j]);
    else
      stmatrix_x2_trans(to, packed[j]);
  }
  bar_sync(warpgroup + 1, 128);
  constexpr int kStored = S::kPlain ? 64 : COUNT * 8;  // tokens
  const int chunk = thread & 7, n = n0 + (S::kPlain ? column : half * 64) + chunk * 8;
  const int m = m0 + (S::kPlain ? half * 64 : column);
  uint16_t* y = static_cast<uint16_t*>(p.y);
#pragma unroll
  for (int step = 0; step < (kStored + 15) / 16; ++step) {
    const int row = step * 16 + (thread >> 3);
    if (row >= kStored || m + row >= p.m) break;
    const uint4 words = *reinterpret_cast<const uint4*>(shared + row * 128 + ((chunk ^ (row & 7)) << 4));
    uint16_t* to = y + static_cast<int64_t>(m + row) * p.n + n;
    if (p.vector) {
      if (n < p.n) *reinterpret_cast<uint4*>(to) = words;
    } else {
      const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (n + i < p.n) to[i] = static_cast<uint16_t>(word[i / 2] >> (i % 2 * 16));
    }
  }
  bar_sync(warpgroup + 1, 128);  // the table has been read
}

// Split-K reduction over the CTAs of a cluster: each CTA owns a share of the fragments, and adds the partial sums in the
// order of ranks. They reuse the memory of the rings.
template <class S, typename Sum>
__device__ __forceinline__ void reduce(const Params& p, Sum (&sums)[S::kHalves][S::kSums], uint32_t base,
                                       const uint8_t* rings, uint32_t table, const uint8_t* shared,
                                       int warpgroup, int rank, int n0, int m0) {
  constexpr int kFragments = S::kColumns / 8;
  const int split = 1 << p.log_split, share = max(1, kFragments >> p.log_split);
  const auto place = [&](int from, int h, int f) {
    return (((from * S::kHalves + h) * share + f) * S::kMathThreads + threadIdx.x) * 16;
  };
#pragma unroll
  for (int h = 0; h < S::kHalves; ++h)
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
      const int owner = f / share;
      const uint32_t to = base + place(rank, h, f - owner * share);
      uint4 bits;
      memcpy(&bits, sums[h] + f * 4, 16);
      st_cluster(mapa(to, owner), bits);
    }
  cluster_sync();
  if (rank * share >= kFragments) return;
#pragma unroll 1
  for (int h = 0; h < S::kHalves; ++h)
#pragma unroll 1
    for (int f = 0; f < share; ++f) {
      Sum all[4] = {};
#pragma unroll 1
      for (int r = 0; r < split; ++r) {
        const uint4 words = *reinterpret_cast<const uint4*>(rings + place(r, h, f));
        Sum part[4];
        memcpy(part, &words, 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) all[i] += part[i];
      }
      const int row = (rank * share + f) * 8;
      if (m0 + row < p.m) store_fragments<S, 1>(p, all, table, shared, warpgroup, n0, m0, h, row);
    }
}

}  // namespace gm::w8a8
#endif
