// Epilogue of latent attention on Hopper: rows of whole contexts are written to the output, parts of contexts to the
// workspace, where they are merged once all have arrived.
#pragma once
#include "attention/sm90/_attention_parts_sm90.cuh"
#include "_mla_work_sm90.cuh"

#ifdef __CUDACC__
namespace gm::mla {

// A row of a block, as (token, head) of q.
struct MlaRow {
  int64_t token;
  int head;
  __device__ __forceinline__ MlaRow(const MlaParams& p, const MlaWork& w, int row) {
    const int query = quotient(w.row0 + row, p.heads, p.by_heads);
    token = w.token + query, head = w.row0 + row - query * p.heads;
  }
};

__device__ __forceinline__ void write_lse(const MlaParams& p, const MlaWork& w, int row, float top,
                                          float sum) {
  const MlaRow at(p, w, row);
  if (p.lse != nullptr) p.lse[at.token * p.heads + at.head] = log_sum_exp(top, sum);
}

// Writes 16 rows of a warp, 256 columns from `column` on, of a whole context. by: 1 / sum of the weights.
template <typename T>
__device__ __forceinline__ void write_rows(const MlaParams& p, const MlaWork& w, const float (&o)[128],
                                           const float (&by)[2], int row0, int column) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = row0 + (lane >> 2) + r * 8;
    const MlaRow at(p, w, row);
    T* const to = static_cast<T*>(p.out) + at.token * p.out_token + at.head * p.out_head + column;
    store_row(to, o, r, by[r], row < w.rows, 256);
  }
}

// Writes the same rows of a part of a context, not normalized, to the workspace.
__device__ __forceinline__ void write_part(const MlaParams& p, const MlaWork& w, const float (&o)[128],
                                           int row0, int column) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = row0 + (lane >> 2) + r * 8;
    if (row >= w.rows) continue;
    float* const to =
        p.parts + (int64_t(w.slot) * MlaShape::kRows + row) * MlaShape::kLatent + column + (lane & 3) * 2;
#pragma unroll
    for (int j = 0; j < 32; ++j)
      *reinterpret_cast<float2*>(to + j * 8) = make_float2(o[j * 4 + r * 2], o[j * 4 + r * 2 + 1]);
  }
}

// Row of part `s` of a context in the workspace: the first part is the last of its range, the others the first.
__device__ __forceinline__ int64_t part_row(const MlaWork& w, int s, int row) {
  return int64_t((w.first_range + s) * 2 + (s == 0)) * MlaShape::kRows + row;
}

// Merges this CTA's share of the rows, COLUMNS times 128 elements at a time. One warp adds the parts of a row, or with
// `split` each of the eight adds an eighth of them; the order is fixed. By both warpgroups.
template <typename T, int COLUMNS>
__device__ __forceinline__ void merge_rows(const MlaParams& p, const MlaWork& w, uint8_t* smem, bool split) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  constexpr int kPieces = 4 / COLUMNS, kBatch = 8 / COLUMNS;
  float2* const sums = reinterpret_cast<float2*>(smem) + warp * w.parts;
  float4* const partial = reinterpret_cast<float4*>(smem + 8 * kMaxCtas * sizeof(float2));
  const int units = w.rows * kPieces, end = units * (w.part + 1) / w.parts;
  const int s0 = split ? w.parts * warp / 8 : 0, s1 = split ? w.parts * (warp + 1) / 8 : w.parts;
  int buffer_index = 0;
#pragma unroll 1
  for (int unit = units * w.part / w.parts + (split ? 0 : warp); unit < end; unit += split ? 1 : 8) {
    const int row = unit / kPieces, column = unit % kPieces * 128 + lane * 4;
    // Loads of the sums are issued before the weights are known.
    float4 v[kBatch][COLUMNS];
    const auto load = [&](int s) {
#pragma unroll
      for (int b = 0; b < kBatch; ++b)
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
          if (s + b < s1)
            v[b][c] = __ldcg(reinterpret_cast<const float4*>(
                p.parts + part_row(w, s + b, row) * MlaShape::kLatent + column + c * 128));
    };
    load(s0);
    float top = -INFINITY, sum = 0.f;
    __syncwarp();
    for (int s = lane; s < w.parts; s += 32) {
      const float2 v = __ldcg(reinterpret_cast<const float2*>(p.part_sums) + part_row(w, s, row));
      sums[s] = v, top = fmaxf(top, v.x);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
    const float base = top == -INFINITY ? 0.f : top;
    for (int s = lane; s < w.parts; s += 32) {
      const float weight = exp2_approx(sums[s].x - base);
      sum += weight * sums[s].y, sums[s].x = weight;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    __syncwarp();

    float4 acc[COLUMNS] = {};
#pragma unroll 1
    for (int s = s0; s < s1; s += kBatch) {
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const float weight = s + b < s1 ? sums[s + b].x : 0.f;
        if (weight > 0.f) {  // a part without visible keys was not written
#pragma unroll
          for (int c = 0; c < COLUMNS; ++c) {
            acc[c].x = fmaf(weight, v[b][c].x, acc[c].x), acc[c].y = fmaf(weight, v[b][c].y, acc[c].y);
            acc[c].z = fmaf(weight, v[b][c].z, acc[c].z), acc[c].w = fmaf(weight, v[b][c].w, acc[c].w);
          }
        }
      }
      load(s + kBatch);
    }
    const auto store = [&](float4 v, int c) {
      const float by = sum == 0.f ? 0.f : 1.f / sum;
      const MlaRow at(p, w, row);
      T* const to = static_cast<T*>(p.out) + at.token * p.out_token + at.head * p.out_head + column + c * 128;
      *reinterpret_cast<uint2*>(to) =
          make_uint2(packed<T>(v.x * by, v.y * by), packed<T>(v.z * by, v.w * by));
      if (column + c * 128 == 0) write_lse(p, w, row, top, sum);
    };
    if (split) {
      float4* const buffer = partial + buffer_index * (8 * 4 * 32);
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) buffer[(warp * 4 + c) * 32 + lane] = acc[c];
      bar_sync(kBarBoth, 256);
      if (warp < COLUMNS) {
        float4 v = buffer[warp * 32 + lane];
#pragma unroll
        for (int i = 1; i < 8; ++i) {
          const float4 other = buffer[(i * 4 + warp) * 32 + lane];
          v.x += other.x, v.y += other.y, v.z += other.z, v.w += other.w;
        }
        store(v, warp);
      }
      buffer_index ^= 1;
    } else {
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) store(acc[c], c);
    }
  }
}

// Waits until all parts of a context are in the workspace, and merges this CTA's share of the rows. The last CTA
// resets the counter.
template <typename T>
__device__ __forceinline__ void merge(const MlaParams& p, const MlaWork& w, uint8_t* smem) {
  unsigned* const arrivals = p.counters + kArrivals + w.first_range;
  if (threadIdx.x == 0) {
    while (ld_acquire(arrivals) < static_cast<unsigned>(w.parts)) {}
  }
  bar_sync(kBarBoth, 256);
  if (w.rows < w.parts)
    merge_rows<T, 1>(p, w, smem, true);
  else
    merge_rows<T, 4>(p, w, smem, w.parts >= 8);
  bar_sync(kBarBoth, 256);
  if (threadIdx.x == 0 && atomicAdd(arrivals, 1u) == 2 * w.parts - 1) *arrivals = 0;
}

// Signals that this CTA's part is in the workspace (release). By both warpgroups.
__device__ __forceinline__ void arrive_part(const MlaParams& p, const MlaWork& w) {
  bar_sync(kBarBoth, 256);
  if (threadIdx.x == 0) red_inc_release(p.counters + kArrivals + w.first_range);
}

}  // namespace gm::mla
#endif
