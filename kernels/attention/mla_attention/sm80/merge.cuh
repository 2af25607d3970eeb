// Adds the parts of contexts that several CTAs had, in the order of the keys, in a launch of its own: a part of 32 rows has 64 KiB, and one CTA
// that added all of a long context would take longer than the others attended.
#pragma once
#include "attend.cuh"

#ifdef __CUDACC__
namespace gm::mla80 {

template <typename T, int TILES>
__device__ __forceinline__ void merge(const Params& p) {
  using S = Shape<TILES>;
  constexpr int kAhead = 4,
                kFours = S::kLatent / 128;  // parts that are loaded at a time; fours of columns of a lane
  constexpr int kCtas = S::kRows / kMergeWarps;  // of a record
  const int lane = threadIdx.x & 31, at = blockIdx.x / kCtas,
            row = (blockIdx.x - at * kCtas) * kMergeWarps + static_cast<int>(threadIdx.x >> 5);
  const Record record = p.records[at];
  if (row >= record.rows) return;
  const int first = at / p.tiles, tile = at - first * p.tiles;
  float4 sum[kFours];
  float top = -INFINITY, weights = 0.f;
#pragma unroll
  for (int c = 0; c < kFours; ++c) sum[c] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
  for (int part = 0; part < record.parts; part += kAhead) {
    float4 read[kAhead][kFours];
    float2 stats[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (part + a >= record.parts) break;
      const float* from = part_at<TILES>(p, first + part + a, tile, first);
      stats[a] = __ldcg(reinterpret_cast<const float2*>(from + S::kRows * S::kLatent) + row);
#pragma unroll
      for (int c = 0; c < kFours; ++c)
        read[a][c] = __ldcg(reinterpret_cast<const float4*>(from + row * S::kLatent + c * 128) + lane);
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (part + a >= record.parts) break;
      float now = stats[a].x;
      const float2 by = part_factors(top, now, p.scale_log2);
      top = now, weights = add_scaled(weights, stats[a].y, by);
#pragma unroll
      for (int c = 0; c < kFours; ++c) {
        sum[c].x = add_scaled(sum[c].x, read[a][c].x, by), sum[c].y = add_scaled(sum[c].y, read[a][c].y, by);
        sum[c].z = add_scaled(sum[c].z, read[a][c].z, by), sum[c].w = add_scaled(sum[c].w, read[a][c].w, by);
      }
    }
  }
  const int of = record.row + row, query = divided(of, p.heads, p.by_heads), head = of - query * p.heads;
  const int64_t token = record.token + query;
  const RowEpilogue epilogue(top, weights, p.scale_log2);
  const float by = epilogue.inverse();
  if (p.lse != nullptr && lane == 0) p.lse[token * p.heads + head] = epilogue.lse();
  T* to = static_cast<T*>(p.out) + token * p.out_token + head * p.out_head + lane * 4;
#pragma unroll
  for (int c = 0; c < kFours; ++c)
    *reinterpret_cast<uint2*>(to + c * 128) =
        make_uint2(packed<T>(sum[c].x * by, sum[c].y * by), packed<T>(sum[c].z * by, sum[c].w * by));
}

}  // namespace gm::mla80
#endif
