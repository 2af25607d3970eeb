// All-reduce, residual addition and RMSNorm in one launch (_push.h has the protocol): a CTA per row, whose sums stay in
// registers until the row's norm is known.
#include <cstdint>
#include <type_traits>

#include "_push.h"

struct AllReduceNormParams {
  PushParams push;
  const void* x;  // [rows, n]
  void *residual, *out;
  const void* weight;  // [n]
  int rows, n;
  float eps;
};

constexpr int kMaxThreads = 512;

#ifdef __CUDACC__

template <typename T, int W, int V>
__device__ __forceinline__ void sum_and_norm(const AllReduceNormParams& q) {
  constexpr int kValues = push::kValues<T>;
  __shared__ float squares[2][32];
  gm::griddepcontrol_launch_dependents();
  const PushParams& p = q.push;
  const int vectors = q.n / kValues;
  const T *x = static_cast<const T*>(q.x), *weight = static_cast<const T*>(q.weight);
  T *residual = static_cast<T*>(q.residual), *out = static_cast<T*>(q.out);
  uint4 scale[V];  // of the weight, which no previous kernel writes
#pragma unroll
  for (int k = 0; k < V; ++k)
    if (const int i = threadIdx.x + k * blockDim.x; i < vectors) scale[k] = push::load(weight + i * kValues);
  gm::griddepcontrol_wait();
  const push::Call call(p);
  const int64_t stride = int64_t(q.rows) * vectors;
  const auto read = [&](const T* from, int row, int i) {
    return push::load(from + int64_t(row) * q.n + i * kValues);
  };
  for (int row = blockIdx.x; row < q.rows; row += gridDim.x) {
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int i = threadIdx.x + k * blockDim.x;
      if (i >= vectors) continue;
      const uint4 own = push::without_empty(read(x, row, i));
#pragma unroll
      for (int d = 1; d < W; ++d)
        if (d < p.world)
          push::store_relaxed(call.slot((p.rank + d) % p.world, p.rank, stride) + int64_t(row) * vectors + i,
                              own);
    }
  }
  call.finish_sends((p.world - 1) * q.rows * vectors);
  int buffer = 0;
  for (int row = blockIdx.x; row < q.rows; row += gridDim.x, buffer ^= 1) {
    uint4 kept[V], before[V];
    float square = 0.f;
#pragma unroll
    for (int k = 0; k < V; ++k)
      if (const int i = threadIdx.x + k * blockDim.x; i < vectors) {
        kept[k] = push::without_empty(read(x, row, i));
        before[k] = read(residual, row, i);
      }
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int i = threadIdx.x + k * blockDim.x;
      if (i >= vectors) continue;
      float total[kValues] = {}, stream[kValues] = {};
      call.sum<T, W>(total, kept[k], stride, int64_t(row) * vectors + i);
      push::add<T>(stream, push::rounded<T>(total));
      push::add<T>(stream, before[k]);
      kept[k] = push::rounded<T>(stream);
      float stored[kValues] = {};
      push::add<T>(stored, kept[k]);
#pragma unroll
      for (int j = 0; j < kValues; ++j) square += stored[j] * stored[j];
      push::store(residual + int64_t(row) * q.n + i * kValues, kept[k]);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) square += __shfl_xor_sync(0xffffffffu, square, step);
    if (threadIdx.x % 32 == 0) squares[buffer][threadIdx.x / 32] = square;
    __syncthreads();
    square = threadIdx.x % 32 < blockDim.x / 32 ? squares[buffer][threadIdx.x % 32] : 0.f;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) square += __shfl_xor_sync(0xffffffffu, square, step);
    const float inverse = rsqrtf(square / q.n + q.eps);
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int i = threadIdx.x + k * blockDim.x;
      if (i >= vectors) continue;
      float value[kValues] = {}, factor[kValues] = {};
      push::add<T>(value, kept[k]);
      push::add<T>(factor, scale[k]);
#pragma unroll
      for (int j = 0; j < kValues; ++j) value[j] = value[j] * inverse * factor[j];
      push::store(out + int64_t(row) * q.n + i * kValues, push::rounded<T>(value));
    }
  }
}

#define GM_KERNEL(name, T, W, V)                                                          \
  extern "C" __global__ void __launch_bounds__(kMaxThreads, W == 2 && V == 1 ? 2 : 1)     \
      all_reduce_norm_##name##_##W##_##V(const __grid_constant__ AllReduceNormParams q) { \
    sum_and_norm<T, W, V>(q);                                                             \
  }
#define GM_KERNELS(name, T) \
  GM_KERNEL(name, T, 2, 1)  \
  GM_KERNEL(name, T, 2, 2)  \
  GM_KERNEL(name, T, 4, 1) GM_KERNEL(name, T, 4, 2) GM_KERNEL(name, T, 8, 1) GM_KERNEL(name, T, 8, 2)

GM_KERNELS(fp16, __half)
GM_KERNELS(bf16, __nv_bfloat16)

#else
#include "calls/all_reduce_add_rms_norm.h"

#define GM_WORLDS(name)                                                                                   \
  {GM_CUBIN, #name "_2_1"}, {GM_CUBIN, #name "_2_2"}, {GM_CUBIN, #name "_4_1"}, {GM_CUBIN, #name "_4_2"}, \
      {GM_CUBIN, #name "_8_1"}, {GM_CUBIN, #name "_8_2"}
static gm::CudaKernel g_kernels[] = {GM_WORLDS(all_reduce_norm_fp16), GM_WORLDS(all_reduce_norm_bf16)};

// residual += the sum of x over the ranks, rounded; out, which may be x, becomes the norm of the residual, times
// weight. each: vectors of 16 bytes per thread, 1 or 2. sms: multiprocessors of the device; all CTAs run at a
// time, because they wait for those of other ranks.
GM_CUDA_CALL(gm_all_reduce_add_rms_norm_sm90, AllReduceAddRmsNorm, each, peers, state, failed, limit,
             capacity, rank, world, sms)
(const GmAllReduceAddRmsNormCall& call, const gm_all_reduce_add_rms_norm_sm90_options& options, int device,
 void* stream) {
  const PushParams push = push_params(options);
  const int64_t rows = call.m, n = call.n;
  const int each = int(options.each);
  if (call.x_type != 1 && call.x_type != 2) return GM_E_DTYPE;
  if (push.world == 0 || each < 1 || each > 2) return GM_E_ARG;
  if (rows < 0 || n < 8 || n % 8 != 0 || n > INT32_MAX) return GM_E_SHAPE;
  const int vectors = int(n / 8), threads = (vectors + each * 32 - 1) / (each * 32) * 32;
  if (threads > kMaxThreads || rows > push.capacity / ((push.world - 1) * vectors)) return GM_E_SHAPE;
  if (!gm::is_aligned(call.x) || !gm::is_aligned(call.residual) || !gm::is_aligned(call.weight) ||
      !gm::is_aligned(call.out))
    return GM_E_ARG;
  if (rows == 0) return GM_OK;
  const int64_t ctas = options.sms * (kMaxThreads / threads) * (push.world == 2 && each == 1 ? 2 : 1);
  AllReduceNormParams q{push,        call.x,    call.residual, call.out,
                        call.weight, int(rows), int(n),        float(call.eps)};
  void* args[] = {&q};
  const int of_world = push.world <= 2 ? 0 : push.world <= 4 ? 1 : 2;
  return g_kernels[(call.x_type - 1) * 6 + of_world * 2 + each - 1].launch(
      device, stream,
      {.grid_x = unsigned(rows < ctas ? rows : ctas), .block = unsigned(threads), .pdl = true}, args);
}

#endif
