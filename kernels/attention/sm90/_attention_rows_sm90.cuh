// Epilogue of attention on Hopper: merges the accumulators of two warpgroups and of the parts of a context, and
// stores them.
#pragma once
#include "_attention_parts_sm90.cuh"
#include "_attention_work_sm90.cuh"
#include "_flash_sm90.cuh"

#ifdef __CUDACC__
namespace gm {

// Merges the second warpgroup's accumulators into the first one's, through the staging buffer. By both
// warpgroups; the first barrier waits until nobody reads the staging buffer any more. Until the next work tile
// only the first warpgroup writes to it.
template <class S, int D>
__device__ __forceinline__ void merge_warpgroups(Accumulators<D>& acc, uint8_t* smem, int group, bool some,
                                                 float scale_log2) {
  const int tid = threadIdx.x & 127, row = (tid >> 5) * 16 + (tid & 31) / 4;
  float4* sums = reinterpret_cast<float4*>(smem + S::kOut) + tid;
  float2* stats = reinterpret_cast<float2*>(smem + S::kSums);
  bar_sync(kBarBoth, 256);
  if (group == 1 && some) {
#pragma unroll
    for (int i = 0; i < D / 8; ++i)
      sums[i * 128] = make_float4(acc.o[i * 4], acc.o[i * 4 + 1], acc.o[i * 4 + 2], acc.o[i * 4 + 3]);
    if ((tid & 3) == 0)
      stats[row] = make_float2(acc.m[0], acc.l[0]), stats[row + 8] = make_float2(acc.m[1], acc.l[1]);
  }
  bar_sync(kBarBoth, 256);
  if (group == 0 && some) {
    float mine[2], theirs[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 other = stats[row + r * 8];
      const float m = fmaxf(acc.m[r], other.x), base = m == -INFINITY ? 0.f : m * scale_log2;
      mine[r] = exp2_approx(fmaf(acc.m[r], scale_log2, -base)),
      theirs[r] = exp2_approx(fmaf(other.x, scale_log2, -base));
      acc.m[r] = m, acc.l[r] = acc.l[r] * mine[r] + other.y * theirs[r];
    }
#pragma unroll
    for (int i = 0; i < D / 8; ++i) {
      const float4 other = sums[i * 128];
      acc.o[i * 4] = acc.o[i * 4] * mine[0] + other.x * theirs[0];
      acc.o[i * 4 + 1] = acc.o[i * 4 + 1] * mine[0] + other.y * theirs[0];
      acc.o[i * 4 + 2] = acc.o[i * 4 + 2] * mine[1] + other.z * theirs[1];
      acc.o[i * 4 + 3] = acc.o[i * 4 + 3] * mine[1] + other.w * theirs[1];
    }
  }
  if (group == 0) bar_sync(kBarGroup, 128);  // its warps have read everything
}

// For contexts whose parts this CTA processes one after the other: adds the earlier parts, by a warp. True after
// the last part; otherwise the sum is kept in this CTA's units of the workspace.
template <class S, int D>
__device__ __forceinline__ bool accumulate_part(const AttentionParams& p, const Work& work,
                                                Accumulators<D>& acc, int warp) {
  const int64_t own = p.unit_count + static_cast<int>(blockIdx.x) * 4 + warp;
  float4* unit = reinterpret_cast<float4*>(p.units + own * S::kUnit) + (threadIdx.x & 31);
  if (work.part() > 0) {
    const float4 stats = __ldcg(unit + D / 8 * 32);
    const float2 by[2] = {part_factors(stats.x, acc.m[0], p.scale_log2),
                          part_factors(stats.y, acc.m[1], p.scale_log2)};
    acc.l[0] = add_scaled(stats.z, acc.l[0], by[0]), acc.l[1] = add_scaled(stats.w, acc.l[1], by[1]);
#pragma unroll
    for (int i = 0; i < D / 8; ++i) {
      const float4 o = __ldcg(unit + i * 32);
      acc.o[i * 4] = add_scaled(o.x, acc.o[i * 4], by[0]);
      acc.o[i * 4 + 1] = add_scaled(o.y, acc.o[i * 4 + 1], by[0]);
      acc.o[i * 4 + 2] = add_scaled(o.z, acc.o[i * 4 + 2], by[1]);
      acc.o[i * 4 + 3] = add_scaled(o.w, acc.o[i * 4 + 3], by[1]);
    }
  }
  if (work.last_part()) return true;
#pragma unroll
  for (int i = 0; i < D / 8; ++i)
    __stcg(unit + i * 32, make_float4(acc.o[i * 4], acc.o[i * 4 + 1], acc.o[i * 4 + 2], acc.o[i * 4 + 3]));
  __stcg(unit + D / 8 * 32, make_float4(acc.m[0], acc.m[1], acc.l[0], acc.l[1]));
  return false;
}

// For contexts whose parts several CTAs process: writes this part to the workspace; the CTA that
// finishes last reduces all parts and writes the rows. By both consumer warpgroups, after join.
template <typename T, class S, int D>
__device__ __forceinline__ void reduce_parts(const AttentionParams& p, const Work& work,
                                             const Accumulators<D>& acc, uint8_t* smem, int group, int warp) {
  constexpr int kUnit = S::kUnit;
  const int lane = threadIdx.x & 31, step = cdiv(work.rows, 16);
  if (group == 0) {
    float* unit = p.units + int64_t(work.unit + work.part() * step + warp) * kUnit;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = lane / 4 + r * 8;
      if (warp * 16 + row >= work.rows) break;
#pragma unroll
      for (int i = 0; i < D / 8; ++i)
        __stcg(reinterpret_cast<float2*>(unit + row * D + i * 8) + (lane & 3),
               make_float2(acc.o[i * 4 + r * 2], acc.o[i * 4 + r * 2 + 1]));
      if ((lane & 3) == 0)
        __stcg(reinterpret_cast<float2*>(unit + 16 * D) + row, make_float2(acc.m[r], acc.l[r]));
    }
  }
  int* last = reinterpret_cast<int*>(smem + S::kTotals) + kLast;
  bar_sync(kBarBoth, 256);
  if (threadIdx.x == 0) {
    unsigned* counter = p.counters + kArrivals + work.unit;
    *last = atomic_inc_acq_rel(counter) + 1 == static_cast<unsigned>(work.parts());
    if (*last) *counter = 0;
  }
  bar_sync(kBarBoth, 256);
  if (!*last) return;
  write_parts<T, D, 3>(
      p, work.token, work.head, work.rows, work.parts(), threadIdx.x, 256, [&](int part, int row) {
        const float* unit = p.units + int64_t(work.unit + part * step + row / 16) * kUnit;
        return PartAddress{unit + row % 16 * D, reinterpret_cast<const float2*>(unit + 16 * D) + row % 16};
      });
}

// Whether TMA stores results: codes and heads of 256 leave no registers for it.
template <typename T, class S>
constexpr bool write_rows_by_tma = S::kStaging > 0 && !S::kKeepsQ && !std::is_same_v<T, RuntimeHalf>;

// Waits until TMA has read what this warp has staged.
__device__ __forceinline__ void await_stores() {
  if ((threadIdx.x & 31) == 0) tma_store_wait_read();
  __syncwarp();
}

// Writes the rows of a warp, divided by their sums: through shared memory, from where TMA stores whole boxes and other
// rows are stored in pieces of 16 bytes, with a few times as many instructions; straight from registers where there is no
// staging buffer. TMA reads it until await_stores.
template <typename T, class S, int D>
__device__ __forceinline__ void write_rows(const AttentionParams& p, const Work& work, Accumulators<D>& acc,
                                           uint8_t* smem, uint32_t base, int row0) {
  constexpr int kColumn = 16 * 128;  // bytes of a column of the staging buffer
  const int lane = threadIdx.x & 31;
  float by[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = row0 + (lane >> 2) + r * 8;
    const int token = row * p.by_group >> 16, head = work.head * p.group + row - token * p.group;
    RowEpilogue epilogue(acc.m[r], acc.l[r], p.scale_log2);
    if (p.sinks != nullptr && row < work.rows) epilogue.add_sink(p.sinks[head]);
    by[r] = epilogue.inverse();
    if (p.lse != nullptr && (lane & 3) == 0 && row < work.rows)
      p.lse[static_cast<int64_t>(work.token + token) * p.heads + head] = epilogue.lse();
    if constexpr (S::kStaging == 0)
      store_row(static_cast<T*>(p.out) + (work.token + token) * p.out_token + head * p.out_head, acc.o, r,
                by[r], row < work.rows, p.head_dim);
  }
  if constexpr (S::kStaging == 0) return;
  // Columns of 64 elements, in the 128-byte swizzle.
  const uint32_t staging = base + S::kOut + (threadIdx.x >> 5) * (16 * D * 2);
  const uint32_t mine = staging + (lane & 15) * 128;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < D / 16; ++i)
    stmatrix_x4(mine + i / 4 * kColumn + (((i * 2 % 8 + (lane >> 4)) ^ (lane & 7)) << 4),
                {packed_as<T>(p, acc.o[i * 8] * by[0], acc.o[i * 8 + 1] * by[0]),
                 packed_as<T>(p, acc.o[i * 8 + 2] * by[1], acc.o[i * 8 + 3] * by[1]),
                 packed_as<T>(p, acc.o[i * 8 + 4] * by[0], acc.o[i * 8 + 5] * by[0]),
                 packed_as<T>(p, acc.o[i * 8 + 6] * by[1], acc.o[i * 8 + 7] * by[1])});
  if (write_rows_by_tma<T, S> && p.box_heads > 0 && row0 + 16 <= work.rows) {
    fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
      const int token = row0 * p.by_group >> 16, head = work.head * p.group + row0 - token * p.group;
#pragma unroll
      for (int c = 0; c < D / 64; ++c)
        tma_store(&p.out_map, staging + c * kColumn, c * 64, head, work.token + token);
      tma_store_commit();
    }
    return;
  }
  __syncwarp();
  constexpr int kChunks = D / 8, kStep = 32 / kChunks;  // 16-byte chunks of a row; rows at a time
  const int chunk = lane % kChunks;
#pragma unroll
  for (int i = 0; i < 16 / kStep; ++i) {
    const int in = i * kStep + lane / kChunks, row = row0 + in;
    if (row < work.rows && chunk * 8 < p.head_dim) {
      const int token = row * p.by_group >> 16, head = work.head * p.group + row - token * p.group;
      const uint4 value =
          ld_shared<uint4>(staging + chunk / 8 * kColumn + in * 128 + ((chunk % 8 ^ (in & 7)) << 4));
      store_16(static_cast<typename Stored<T>::type*>(p.out) + (work.token + token) * p.out_token +
                   head * p.out_head + chunk * 8,
               value);
    }
  }
}

}  // namespace gm
#endif
