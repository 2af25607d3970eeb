// Permutation and combination around the products of experts: entries sorted by expert, in one launch, and
// the weighted sum of each token's rows.
#include <cstdint>

#include "gm_cuda.h"
#include "sm90/ptx.cuh"
#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

struct PermuteParams {
  const int* ids;  // [entries]
  int *offsets, *permutation, *inverse;
  int entries, experts;
};

struct RowsParams {
  const void* x;  // rows `ldx` 16-byte chunks apart
  void* y;
  const int *permutation, *last;  // last: the end of the last expert's rows
  int64_t ldx;
  int chunks, top_k;
};

struct CombineParams {
  const void* y;         // [entries, width]
  const int* inverse;    // [tokens * top_k]
  const float* weights;  // [tokens, top_k]
  void* out;             // [tokens, width]
  int top_k, width, parts;
};

constexpr int kPermuteWarps = 32, kPart = 2048,  // entries of a CTA
    kRowWarps = 8, kCombineThreads = 128, kColumns = 8;

#ifdef __CUDACC__

// The lanes of a warp with the same owner, of `bits` bits, by ballots, which are several times faster than match_any.
__device__ __forceinline__ unsigned match_lanes(int owner, int bits) {
  unsigned same = 0xffffffffu;
  for (int b = 0; b < bits; ++b) {
    const bool set = owner >> b & 1;
    const unsigned with = __ballot_sync(0xffffffffu, set);
    same &= set ? with : ~with;
  }
  return same;
}

// A stable counting sort. A CTA places the entries of its part, and counts those of the other parts for its offsets.
// Every warp has consecutive entries; lanes of one expert are matched by ballots, so that positions need no atomics.
extern "C" __global__ void __launch_bounds__(kPermuteWarps * 32, 1)
    moe_permute(const __grid_constant__ PermuteParams p) {
  // before, after: number of entries of earlier and later parts by owner; counts: [warps][owners], of this part. The
  // last owner has the ids that are no expert.
  extern __shared__ int before[];
  __shared__ int sums[32];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, owners = p.experts + 1;
  const int part_begin = min(blockIdx.x * kPart, p.entries), part_end = min(part_begin + kPart, p.entries);
  const int warps = min(kPermuteWarps, (p.entries + 31) / 32);
  int *after = before + owners, *counts = after + owners, *mine = counts + warp * owners;
  const int bits = 32 - __clz(owners);
  const int each = kPart / kPermuteWarps, begin = min(part_begin + warp * each, part_end),
            end = min(begin + each, part_end);
  for (int i = threadIdx.x; i < (2 + warps) * owners; i += blockDim.x) before[i] = 0;
  gm::griddepcontrol_wait();
  gm::griddepcontrol_launch_dependents();
  __syncthreads();
  const auto owner_of = [&](int id) { return id >= 0 && id < p.experts ? id : p.experts; };
  const auto owner_at = [&](int entry) {
    return entry < end ? owner_of(__ldcg(p.ids + entry)) : owners;  // owners: no entry
  };
  if (gridDim.x > 1) {
#pragma unroll 8
    for (int entry = threadIdx.x; entry < p.entries; entry += blockDim.x) {
      const int owner = owner_of(__ldcg(p.ids + entry));
      if (entry < part_begin) atomicAdd(before + owner, 1);
      if (entry >= part_end) atomicAdd(after + owner, 1);
    }
  }
  int owner[kPart / kPermuteWarps / 32];
#pragma unroll
  for (int i = 0; i < each / 32; ++i) owner[i] = owner_at(begin + i * 32 + lane);
#pragma unroll
  for (int i = 0; i < each / 32; ++i) {
    const unsigned same = match_lanes(owner[i], bits);
    if (owner[i] < owners && (same & ((1u << lane) - 1)) == 0) mine[owner[i]] += __popc(same);
    __syncwarp();
  }
  __syncthreads();
  // Turns the counts into positions: within an expert, then among all entries.
  for (int first = 0, base = 0; first < owners; first += blockDim.x) {
    const int one = first + threadIdx.x;
    int total = 0;
    if (one < owners) {
      total = before[one];
      for (int w = 0; w < warps; ++w) {
        const int count = counts[w * owners + one];
        counts[w * owners + one] = total;
        total += count;
      }
      total += after[one];
    }
    int inclusive = total;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int lower = __shfl_up_sync(0xffffffffu, inclusive, step);
      if (lane >= step) inclusive += lower;
    }
    if (lane == 31) sums[warp] = inclusive;
    __syncthreads();
    int start = base + inclusive - total;
#pragma unroll
    for (int w = 0; w < kPermuteWarps; ++w) {
      if (w < warp) start += sums[w];
      base += sums[w];
    }
    if (one < owners) {
      if (blockIdx.x == 0) p.offsets[one] = start;  // of the last owner: the end of the last expert
      for (int w = 0; w < warps; ++w) counts[w * owners + one] += start;
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < each / 32; ++i) {
    const unsigned same = match_lanes(owner[i], bits), below = same & ((1u << lane) - 1);
    const int entry = begin + i * 32 + lane;
    if (owner[i] < owners) {
      const int place = mine[owner[i]] + __popc(below);
      p.permutation[place] = entry;
      p.inverse[entry] = owner[i] < p.experts ? place : -1;
    }
    __syncwarp();
    if (owner[i] < owners && below == 0) mine[owner[i]] += __popc(same);
    __syncwarp();
  }
}

// Gathers rows of x in the order of experts, a warp per row, up to the last expert's.
extern "C" __global__ void __launch_bounds__(kRowWarps * 32) moe_rows(const __grid_constant__ RowsParams p) {
  gm::griddepcontrol_wait();
  gm::griddepcontrol_launch_dependents();  // after the wait: the next kernel may read the offsets
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowWarps + (threadIdx.x >> 5);
  if (row >= __ldcg(p.last)) return;
  const uint4* from = static_cast<const uint4*>(p.x) + __ldcg(p.permutation + row) / p.top_k * p.ldx;
  uint4* to = static_cast<uint4*>(p.y) + row * p.chunks;
#pragma unroll 4
  for (int i = threadIdx.x & 31; i < p.chunks; i += 32) to[i] = from[i];
}

// Eight columns of a token per thread, a part of its columns per CTA; adds in the order of k, in float32, rounded once.
template <typename T>
__device__ __forceinline__ void combine(const CombineParams& p) {
  gm::griddepcontrol_launch_dependents();
  gm::griddepcontrol_wait();
  const int64_t token = blockIdx.x / p.parts;
  const int column = (blockIdx.x % p.parts * kCombineThreads + threadIdx.x) * kColumns;
  if (column >= p.width) return;
  const bool vector = p.width % kColumns == 0;  // rows are 16-byte aligned
  const int columns = min(kColumns, p.width - column);
  const T* y = static_cast<const T*>(p.y) + column;
  float sum[kColumns] = {};
  constexpr int kRows = 8;  // loaded at a time
  for (int first = 0; first < p.top_k; first += kRows) {
    int64_t place[kRows];
    float weight[kRows];
    uint4 rows[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const bool there = first + i < p.top_k;
      place[i] = there ? __ldcg(p.inverse + token * p.top_k + first + i) : -1;
      weight[i] = there ? __ldcg(p.weights + token * p.top_k + first + i) : 0.f;
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (place[i] < 0) continue;
      const T* from = y + place[i] * p.width;
      if (vector)
        rows[i] = __ldcg(reinterpret_cast<const uint4*>(from));
      else
        for (int j = 0; j < columns; ++j) reinterpret_cast<T*>(rows + i)[j] = from[j];
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (place[i] < 0) continue;  // a weight of 0 would not do: what was not loaded may be NaN
#pragma unroll
      for (int j = 0; j < kColumns; ++j)
        sum[j] += weight[i] * static_cast<float>(reinterpret_cast<const T*>(rows + i)[j]);
    }
  }
  T result[kColumns];
#pragma unroll
  for (int i = 0; i < kColumns; ++i) result[i] = T(sum[i]);
  T* to = static_cast<T*>(p.out) + token * p.width + column;
  if (vector)
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(result);
  else
    for (int i = 0; i < columns; ++i) to[i] = result[i];
}

extern "C" __global__ void __launch_bounds__(kCombineThreads)
    moe_combine_bf16(const __grid_constant__ CombineParams p) {
  combine<__nv_bfloat16>(p);
}
extern "C" __global__ void __launch_bounds__(kCombineThreads)
    moe_combine_fp16(const __grid_constant__ CombineParams p) {
  combine<__half>(p);
}

#else
#include "args.h"
#include "calls/combine.h"
#include "calls/permute.h"

static gm::CudaKernel g_permute{GM_CUBIN, "moe_permute"}, g_rows{GM_CUBIN, "moe_rows"},
    g_combine_bf16{GM_CUBIN, "moe_combine_bf16"}, g_combine_fp16{GM_CUBIN, "moe_combine_fp16"};

// As op permute has them, of at most 1024 experts.
GM_CUDA_CALL(gm_moe_permute_sm90, Permute)
(const GmPermuteCall& call, const gm_moe_permute_sm90_options&, int device, void* stream) {
  const int64_t entries = call.m * call.top_k;
  const int experts = int(call.experts);
  if (entries < 0 || entries > INT32_MAX - 1024 || call.experts < 1 || call.experts > 1024) return GM_E_SHAPE;
  PermuteParams p{static_cast<const int*>(call.ids),
                  static_cast<int*>(call.expert_offsets),
                  static_cast<int*>(call.permutation),
                  static_cast<int*>(call.inverse),
                  int(entries),
                  experts};
  const int warps = entries < kPermuteWarps * 32 ? int(entries + 31) / 32 : kPermuteWarps;
  const int parts = entries > kPart ? int((entries + kPart - 1) / kPart) : 1;
  void* args[] = {&p};
  return g_permute.launch(device, stream,
                          {.grid_x = unsigned(parts),
                           .block = kPermuteWarps * 32,
                           .smem = unsigned((2 + warps) * (experts + 1) * 4),
                           .pdl = true},
                          args);
}

GM_CUDA_ARGS(gm_moe_rows_sm90, GmMoeRowsArgs)(const GmMoeRowsArgs* args) {
  const GmMoeRowsArgs& a = *args;
  if (a.entries < 0 || a.entries > INT32_MAX || a.columns < 1 || a.columns % 8 != 0 || a.ldx % 8 != 0 ||
      a.top_k < 1)
    return GM_E_SHAPE;
  if (!gm::is_aligned(a.x) || !gm::is_aligned(a.y)) return GM_E_ARG;
  if (a.entries == 0) return GM_OK;
  RowsParams p{a.x, a.y, a.permutation, a.last, a.ldx / 8, a.columns / 8, a.top_k};
  void* arguments[] = {&p};
  return g_rows.launch(
      a.device, a.stream,
      {.grid_x = unsigned((a.entries + kRowWarps - 1) / kRowWarps), .block = kRowWarps * 32, .pdl = true},
      arguments);
}

// Of fp16 or bf16.
GM_CUDA_CALL(gm_moe_combine_sm90, Combine)
(const GmCombineCall& call, const gm_moe_combine_sm90_options&, int device, void* stream) {
  const int64_t tokens = call.m, width = call.h;
  if (call.x_type != 1 && call.x_type != 2) return GM_E_DTYPE;
  if (tokens < 0 || call.top_k < 1 || call.top_k > INT32_MAX || width < 1 || width > INT32_MAX)
    return GM_E_SHAPE;
  const int64_t parts = (width + kCombineThreads * kColumns - 1) / (kCombineThreads * kColumns);
  if (tokens * parts > INT32_MAX) return GM_E_SHAPE;
  if (tokens == 0) return GM_OK;
  if (width % kColumns == 0 && !(gm::is_aligned(call.y) && gm::is_aligned(call.out))) return GM_E_ARG;
  CombineParams p{call.y,
                  static_cast<const int*>(call.inverse),
                  static_cast<const float*>(call.weights),
                  call.out,
                  int(call.top_k),
                  int(width),
                  int(parts)};
  void* args[] = {&p};
  return (call.x_type == 2 ? g_combine_bf16 : g_combine_fp16)
      .launch(device, stream, {.grid_x = unsigned(tokens * parts), .block = kCombineThreads, .pdl = true},
              args);
}

#endif
