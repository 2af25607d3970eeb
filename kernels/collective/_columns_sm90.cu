// All-gather and all-to-all of columns through peer memory (_push.h has the protocol). A rank sends all its columns to
// every other one, or to each a block of its own.
#include <cstdint>
#include <type_traits>

#include "_push.h"

struct ColumnsParams {
  PushParams push;
  const void* x;  // [rows, vectors], or [rows, world, vectors] of an all-to-all
  void* out;      // [rows, world, vectors]
  int rows, vectors;
};

constexpr int kThreads = 256;

#ifdef __CUDACC__

template <bool kToAll, int W>
__device__ __forceinline__ void send_columns(const ColumnsParams& q) {
  gm::griddepcontrol_launch_dependents();
  gm::griddepcontrol_wait();
  const PushParams& p = q.push;
  const push::Call call(p);
  const int total = q.rows * q.vectors, step = gridDim.x * blockDim.x,
            first = blockIdx.x * blockDim.x + threadIdx.x;
  const auto place = [&](int i, int source) {
    return static_cast<uint4*>(q.out) + (int64_t(i / q.vectors) * p.world + source) * q.vectors +
           i % q.vectors;
  };
  const auto read = [&](int i, int to) {
    const int64_t at = kToAll ? (int64_t(i / q.vectors) * p.world + to) * q.vectors + i % q.vectors : i;
    return push::without_empty(__ldcg(static_cast<const uint4*>(q.x) + at));
  };
  for (int i = first; i < total; i += step) {
    const uint4 own = read(i, p.rank);
#pragma unroll
    for (int d = 1; d < W; ++d)
      if (const int to = (p.rank + d) % p.world; d < p.world)
        push::store_relaxed(call.slot(to, p.rank, total) + i, kToAll ? read(i, to) : own);
    *place(i, p.rank) = own;
  }
  call.finish_sends((p.world - 1) * total);
  for (int i = first; i < total; i += step) {
    uint4 v[W];
#pragma unroll
    for (int s = 0; s < W; ++s)
      if (s < p.world && s != p.rank) v[s] = push::load_relaxed(call.slot(p.rank, s, total) + i);
#pragma unroll
    for (int s = 0; s < W; ++s) {
      if (s >= p.world || s == p.rank) continue;
      if (!push::has_arrived(v[s])) v[s] = push::wait(call.slot(p.rank, s, total) + i, p, s);
      *place(i, s) = v[s];
    }
  }
}

#define GM_KERNEL(name, to_all, W)                          \
  extern "C" __global__ void __launch_bounds__(kThreads, 2) \
      name##_##W(const __grid_constant__ ColumnsParams q) { \
    send_columns<to_all, W>(q);                             \
  }
#define GM_KERNELS(name, to_all) \
  GM_KERNEL(name, to_all, 2)     \
  GM_KERNEL(name, to_all, 4)     \
  GM_KERNEL(name, to_all, 8)

GM_KERNELS(all_gather, false)
GM_KERNELS(all_to_all, true)

#else
#include "calls/all_gather.h"
#include "calls/all_to_all.h"

#define GM_WORLDS(name) {GM_CUBIN, #name "_2"}, {GM_CUBIN, #name "_4"}, {GM_CUBIN, #name "_8"}
static gm::CudaKernel g_kernels[] = {GM_WORLDS(all_gather), GM_WORLDS(all_to_all)};

// Columns are of a multiple of 16 bytes. sms: multiprocessors of the device; all CTAs run at a time, because they
// wait for those of other ranks.
template <typename Call>
static int launch_columns(const Call& call, const PushParams& push, int64_t sms, int first_kernel, int device,
                          void* stream) {
  const int64_t rows = call.m, bytes = call.n * (call.x_type == 0 ? 4 : 2);
  if (push.world == 0) return GM_E_ARG;
  if (call.x_type < 0 || call.x_type > 2) return GM_E_DTYPE;
  if (!gm::is_aligned(call.x) || !gm::is_aligned(call.out)) return GM_E_ARG;
  if (rows < 0 || bytes < 16 || bytes % 16 != 0 || rows > push.capacity / ((push.world - 1) * (bytes / 16)))
    return GM_E_SHAPE;
  if (rows == 0) return GM_OK;
  ColumnsParams q{push, call.x, call.out, int(rows), int(bytes / 16)};
  void* args[] = {&q};
  const int64_t grid = (rows * (bytes / 16) + kThreads - 1) / kThreads, ctas = sms * 2;
  const int of_world = push.world <= 2 ? 0 : push.world <= 4 ? 1 : 2;
  return g_kernels[first_kernel + of_world].launch(
      device, stream, {.grid_x = unsigned(grid < ctas ? grid : ctas), .block = kThreads, .pdl = true}, args);
}

GM_CUDA_CALL(gm_all_gather_sm90, AllGather, peers, state, failed, limit, capacity, rank, world, sms)
(const GmAllGatherCall& call, const gm_all_gather_sm90_options& options, int device, void* stream) {
  return launch_columns(call, push_params(options), options.sms, 0, device, stream);
}

GM_CUDA_CALL(gm_all_to_all_sm90, AllToAll, peers, state, failed, limit, capacity, rank, world, sms)
(const GmAllToAllCall& call, const gm_all_to_all_sm90_options& options, int device, void* stream) {
  return launch_columns(call, push_params(options), options.sms, 3, device, stream);
}

#endif
