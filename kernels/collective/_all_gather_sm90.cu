// All-gather of columns through peer memory (_push.h has the protocol).
#include <cstdint>
#include <type_traits>

#include "_push.h"

struct AllGatherParams {
  PushParams push;
  const void* x;  // [rows, vectors]
  void* out;      // [rows, world, vectors]
  int rows, vectors;
};

constexpr int kThreads = 256;

#ifdef __CUDACC__

template <int W>
__device__ __forceinline__ void all_gather(const AllGatherParams& q) {
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
  for (int i = first; i < total; i += step) {
    const uint4 own = push::without_empty(__ldcg(static_cast<const uint4*>(q.x) + i));
#pragma unroll
    for (int d = 1; d < W; ++d)
      if (d < p.world) push::store_relaxed(call.slot((p.rank + d) % p.world, p.rank, total) + i, own);
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

#define GM_KERNEL(W)                                              \
  extern "C" __global__ void __launch_bounds__(kThreads, 2)       \
      all_gather_##W(const __grid_constant__ AllGatherParams q) { \
    all_gather<W>(q);                                             \
  }
GM_KERNEL(2)
GM_KERNEL(4)
GM_KERNEL(8)

#else
#include "calls/all_gather.h"

static gm::CudaKernel g_kernels[] = {
    {GM_CUBIN, "all_gather_2"}, {GM_CUBIN, "all_gather_4"}, {GM_CUBIN, "all_gather_8"}};

// Rows are of a multiple of 16 bytes. sms: multiprocessors of the device; all CTAs run at a time, because they
// wait for those of other ranks.
GM_CUDA_CALL(gm_all_gather_sm90, AllGather, peers, state, failed, limit, capacity, rank, world, sms)
(const GmAllGatherCall& call, const gm_all_gather_sm90_options& options, int device, void* stream) {
  const PushParams push = push_params(options);
  const int64_t rows = call.m, bytes = call.n * (call.x_type == 0 ? 4 : 2);
  if (push.world == 0) return GM_E_ARG;
  if (call.x_type < 0 || call.x_type > 2) return GM_E_DTYPE;
  if (!gm::is_aligned(call.x) || !gm::is_aligned(call.out)) return GM_E_ARG;
  if (rows < 0 || bytes < 16 || bytes % 16 != 0 || rows > push.capacity / ((push.world - 1) * (bytes / 16)))
    return GM_E_SHAPE;
  if (rows == 0) return GM_OK;
  AllGatherParams q{push, call.x, call.out, int(rows), int(bytes / 16)};
  void* args[] = {&q};
  const int64_t grid = (rows * (bytes / 16) + kThreads - 1) / kThreads, ctas = options.sms * 2;
  const int of_world = push.world <= 2 ? 0 : push.world <= 4 ? 1 : 2;
  return g_kernels[of_world].launch(
      device, stream, {.grid_x = unsigned(grid < ctas ? grid : ctas), .block = kThreads, .pdl = true}, args);
}

#endif
