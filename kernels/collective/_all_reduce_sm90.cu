// Sums over ranks whose GPUs can write each other's memory (_push.h has the protocol).
//
// One-shot: every rank sends all its values to every other one, and each adds them all. Two-shot: reduce-scatter and
// all-gather; from three ranks on less crosses the link, but in two trips.
#include <cstdint>
#include <type_traits>

#include "_push.h"

struct AllReduceParams {
  PushParams push;
  void* x;                      // [elements]
  int elements, vectors, part;  // part: vectors that a rank reduces (two-shot)
};

constexpr int kThreads = 512;

#ifdef __CUDACC__

template <typename T, int W>
__device__ __forceinline__ void one_shot(const AllReduceParams& q) {
  gm::griddepcontrol_launch_dependents();
  gm::griddepcontrol_wait();
  const PushParams& p = q.push;
  const push::Call call(p);
  constexpr int kValues = push::kValues<T>, kUnroll = W == 2 ? 4 : W == 4 ? 2 : 1;
  T* x = static_cast<T*>(q.x);
  const int step = gridDim.x * blockDim.x, first = blockIdx.x * blockDim.x + threadIdx.x;
  const auto read = [&](int i) {
    return push::without_empty(push::load(x + i * kValues, q.elements - i * kValues));
  };
  for (int begin = first; begin < q.vectors; begin += kUnroll * step) {
    uint4 own[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
      if (const int i = begin + u * step; i < q.vectors) own[u] = read(i);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
#pragma unroll
      for (int d = 1; d < W; ++d)
        if (const int i = begin + u * step; i < q.vectors && d < p.world) {
          const int to = (p.rank + d) % p.world;
          push::store_relaxed(call.slot(to, p.rank, q.vectors) + i, own[u]);
        }
  }
  call.finish_sends((p.world - 1) * q.vectors);
  for (int begin = first; begin < q.vectors; begin += kUnroll * step) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
      if (const int i = begin + u * step; i < q.vectors) {
        float total[kValues] = {};
        call.sum<T, W>(total, read(i), q.vectors, i);
        push::store(x + i * kValues, push::rounded<T>(total), q.elements - i * kValues);
      }
  }
}

template <typename T, int W>
__device__ __forceinline__ void two_shot(const AllReduceParams& q) {
  gm::griddepcontrol_launch_dependents();
  gm::griddepcontrol_wait();
  const PushParams& p = q.push;
  const push::Call call(p);
  constexpr int kValues = push::kValues<T>;
  T* x = static_cast<T*>(q.x);
  const int step = gridDim.x * blockDim.x, first = blockIdx.x * blockDim.x + threadIdx.x;
  const int sums = (p.world - 1) * q.part;  // offset of the slots for the sums, after those for the values
  const auto read = [&](int i) {
    return push::without_empty(push::load(x + i * kValues, q.elements - i * kValues));
  };
  for (int i = first; i < q.part; i += step) {
    uint4 own[W];
#pragma unroll
    for (int d = 1; d < W; ++d)
      if (const int at = (p.rank + d) % p.world * q.part + i; d < p.world && at < q.vectors)
        own[d] = read(at);
#pragma unroll
    for (int d = 1; d < W; ++d)
      if (const int to = (p.rank + d) % p.world; d < p.world && to * q.part + i < q.vectors)
        push::store_relaxed(call.slot(to, p.rank, q.part) + i, own[d]);
  }
  call.finish_sends(2 * sums);
  for (int i = first; i < q.part; i += step) {
    const int at = p.rank * q.part + i;
    if (at >= q.vectors) break;
    float total[kValues] = {};
    call.sum<T, W>(total, read(at), q.part, i);
    const uint4 result = push::without_empty(push::rounded<T>(total));
#pragma unroll
    for (int d = 1; d < W; ++d)
      if (d < p.world)
        push::store_relaxed(call.slot((p.rank + d) % p.world, p.rank, q.part) + sums + i, result);
    push::store(x + at * kValues, result, q.elements - at * kValues);
  }
  for (int i = first; i < q.part; i += step) {
    uint4 v[W];
#pragma unroll
    for (int s = 0; s < W; ++s)
      if (s < p.world && s != p.rank && s * q.part + i < q.vectors)
        v[s] = push::load_relaxed(call.slot(p.rank, s, q.part) + sums + i);
#pragma unroll
    for (int s = 0; s < W; ++s) {
      const int at = s * q.part + i;
      if (s >= p.world || s == p.rank || at >= q.vectors) continue;
      if (!push::has_arrived(v[s])) v[s] = push::wait(call.slot(p.rank, s, q.part) + sums + i, p, s);
      push::store(x + at * kValues, v[s], q.elements - at * kValues);
    }
  }
}

#define GM_KERNEL(shots, name, T, W)                                                 \
  extern "C" __global__ void __launch_bounds__(kThreads, W == 2 ? 2 : 1)             \
      all_reduce_##shots##_##name##_##W(const __grid_constant__ AllReduceParams q) { \
    shots<T, W>(q);                                                                  \
  }
#define GM_KERNELS(name, T)       \
  GM_KERNEL(one_shot, name, T, 2) \
  GM_KERNEL(one_shot, name, T, 4) \
  GM_KERNEL(one_shot, name, T, 8) \
  GM_KERNEL(two_shot, name, T, 2) GM_KERNEL(two_shot, name, T, 4) GM_KERNEL(two_shot, name, T, 8)

GM_KERNELS(fp32, float)
GM_KERNELS(fp16, __half)
GM_KERNELS(bf16, __nv_bfloat16)

#else
#include "calls/all_reduce.h"

#define GM_WORLDS(name) {GM_CUBIN, #name "_2"}, {GM_CUBIN, #name "_4"}, {GM_CUBIN, #name "_8"}
static gm::CudaKernel g_kernels[] = {
    GM_WORLDS(all_reduce_one_shot_fp32), GM_WORLDS(all_reduce_one_shot_fp16),
    GM_WORLDS(all_reduce_one_shot_bf16), GM_WORLDS(all_reduce_two_shot_fp32),
    GM_WORLDS(all_reduce_two_shot_fp16), GM_WORLDS(all_reduce_two_shot_bf16),
};

// x becomes the sum over the ranks, in float32, in rank order, rounded once. shots: 1 or 2. sms: multiprocessors of
// the device; all CTAs must be resident, since they wait for those of other ranks.
GM_CUDA_CALL(gm_all_reduce_sm90, AllReduce, shots, threads, peers, state, failed, limit, capacity, rank,
             world, sms)
(const GmAllReduceCall& call, const gm_all_reduce_sm90_options& options, int device, void* stream) {
  const PushParams push = push_params(options);
  const int64_t elements = call.m * call.n, shots = options.shots, threads = options.threads;
  const int type = int(call.x_type);
  if (type < 0 || type > 2) return GM_E_DTYPE;
  if (push.world == 0 || shots < 1 || shots > 2 || threads < 32 || threads > kThreads || threads % 32 != 0)
    return GM_E_ARG;
  const int values = type == 0 ? 4 : 8;
  const int64_t vectors = (elements + values - 1) / values, part = (vectors + push.world - 1) / push.world;
  const int64_t used = (push.world - 1) * (shots == 1 ? vectors : 2 * part);
  if (!gm::is_aligned(call.x)) return GM_E_ARG;
  if (elements < 0 || used > push.capacity) return GM_E_SHAPE;
  if (elements == 0) return GM_OK;
  AllReduceParams q{push, call.x, int(elements), int(vectors), int(part)};
  const int64_t work = shots == 1 ? vectors : part, grid = (work + threads - 1) / threads;
  const int64_t ctas = options.sms * (kThreads / threads) * (push.world == 2 ? 2 : 1);
  void* args[] = {&q};
  const int of_world = push.world <= 2 ? 0 : push.world <= 4 ? 1 : 2;
  return g_kernels[(shots - 1) * 9 + type * 3 + of_world].launch(
      device, stream,
      {.grid_x = unsigned(grid < ctas ? grid : ctas), .block = unsigned(threads), .pdl = true}, args);
}

#endif
