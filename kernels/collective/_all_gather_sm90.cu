// The columns of all ranks beside each other, over the memory of peers (_push.h has the protocol).
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
    const uint4 own = push::sendable(__ldcg(static_cast<const uint4*>(q.x) + i));
#pragma unroll
    for (int d = 1; d < W; ++d)
      if (d < p.world) push::send(call.slot((p.rank + d) % p.world, p.rank, total) + i, own);
    *place(i, p.rank) = own;
  }
  call.settle((p.world - 1) * total);
  for (int i = first; i < total; i += step) {
    uint4 v[W];
#pragma unroll
    for (int s = 0; s < W; ++s)
      if (s < p.world && s != p.rank) v[s] = push::peek(call.slot(p.rank, s, total) + i);
#pragma unroll
    for (int s = 0; s < W; ++s) {
      if (s >= p.world || s == p.rank) continue;
      if (!push::arrived(v[s])) v[s] = push::wait(call.slot(p.rank, s, total) + i, p, s);
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

static gm::CudaKernel g_kernels[] = {
    {GM_CUBIN, "all_gather_2"}, {GM_CUBIN, "all_gather_4"}, {GM_CUBIN, "all_gather_8"}};

// x [rows, bytes] of each rank -> out [rows, world, bytes]; bytes of a row: a multiple of 16. sms:
// multiprocessors of the device; all CTAs run at a time, because they wait for those of other ranks.
GM_CUDA_ENTRY(gm_all_gather_sm90)
(const PushParams* push, const void* x, void* out, int64_t rows, int64_t bytes, int sms, int device,
 void* stream) {
  if (push->world < 2 || push->world > kMaxRanks || push->rank < 0 || push->rank >= push->world || sms < 1)
    return GM_E_ARG;
  if (reinterpret_cast<uintptr_t>(x) % 16 != 0 || reinterpret_cast<uintptr_t>(out) % 16 != 0) return GM_E_ARG;
  if (rows < 0 || bytes < 16 || bytes % 16 != 0 || rows > push->capacity / ((push->world - 1) * (bytes / 16)))
    return GM_E_SHAPE;
  if (rows == 0) return GM_OK;
  AllGatherParams q{*push, x, out, int(rows), int(bytes / 16)};
  void* args[] = {&q};
  const int64_t grid = (rows * (bytes / 16) + kThreads - 1) / kThreads, ctas = int64_t(sms) * 2;
  const int of_world = push->world <= 2 ? 0 : push->world <= 4 ? 1 : 2;
  return g_kernels[of_world].launch(
      device, stream, {.grid_x = unsigned(grid < ctas ? grid : ctas), .block = kThreads, .pdl = true}, args);
}

#endif
