// y[M, N] = x[M, K] · W[N, K]^T in fp16 or bf16 at M <= 16, at the speed at which W is read.
//
//  - W is the A operand of mma.m16n8k16, x the B operand: the instruction's M of 16 is N of the problem.
//  - K is permuted alike in both operands, so that the 16 bytes that a lane loads are its fragments of two instructions,
//    and W goes from global memory to registers without shared memory.
//  - K is split over the warps of a CTA and the CTAs of a cluster. Their sums are reduced in shared memory in a fixed
//    order: the result is bitwise reproducible.
//  - Weights are constant, so their first loads are issued before griddepcontrol.wait; x is read after it.
//  - With silu_mul the 16 rows of a tile are 8 of gate and 8 of up, so that a lane has both of a column.
#include <cstdint>

#include "gm_cuda.h"

struct DenseParams {
  const void* w;
  const void* x;
  void* y;
  const void* bias;
  const void* residual;
  int64_t ldx;
  int m, n, k;
  int half;       // rows of the gate, or 0
  int log_split;  // CTAs of a cluster
};

#ifdef __CUDACC__
#include "sm90/mma.cuh"

namespace gm {

constexpr int kRows = 16, kStep = 64, kMaxWarps = 8;

__device__ __forceinline__ uint4 load_weights(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// Not by the read-only path: the previous kernel wrote x.
__device__ __forceinline__ uint4 load_x(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

// NT: columns of x in eights.  RT: tiles of 16 rows of W per warp.
template <typename T, int NT, int RT>
__device__ __forceinline__ void linear_dense(const DenseParams& p) {
  constexpr int kDepth = 4 / RT;               // steps of W in flight
  constexpr int kAhead = NT > 1 ? 2 : kDepth;  // steps of x in flight
  constexpr int kElems = RT * NT * 32;         // float4 of a warp's sums
  extern __shared__ float4 sums[];             // of each warp; then those of the cluster's CTAs
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), warps = blockDim.x >> 5;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int split = 1 << p.log_split, rank = blockIdx.x & (split - 1);
  const int64_t tile0 = static_cast<int64_t>(blockIdx.x >> p.log_split) * RT;
  if (split > 1) cluster_arrive_relaxed();

  // Row i of tile r in W; rows past the end repeat the last one and are not stored.
  const auto row_of = [&](int r, int i) -> int64_t {
    const int64_t tile = tile0 + r;
    return p.half ? tile * 8 + (i & 7) + (i >= 8 ? p.half : 0) : tile * kRows + i;
  };
  const auto is_row = [&](int r, int i) {
    return p.half ? (tile0 + r) * 8 + (i & 7) < p.half : (tile0 + r) * kRows + i < p.n;
  };

  const int slices = warps << p.log_split, slice = rank * warps + warp;
  const int all = (p.k + kStep - 1) / kStep;
  const int first = static_cast<int>(static_cast<int64_t>(all) * slice / slices);
  const int steps = static_cast<int>(static_cast<int64_t>(all) * (slice + 1) / slices) - first;
  const int k0 = first * kStep + t * 8;  // the lane's first column
  const uint4* rows[RT][2];
#pragma unroll
  for (int r = 0; r < RT; ++r)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t row = min(row_of(r, g + h * 8), static_cast<int64_t>(p.n - 1));
      rows[r][h] = reinterpret_cast<const uint4*>(static_cast<const T*>(p.w) + row * p.k + k0);
    }
  uint4 w[kDepth][RT][2][2];  // [row half][chunk of 32 columns]
  const auto load_step = [&](int slot, int step) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const bool here = k0 + step * kStep + c * 32 < p.k;
#pragma unroll
      for (int r = 0; r < RT; ++r)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          w[slot][r][h][c] =
              here ? load_weights(rows[r][h] + step * (kStep / 8) + c * 4) : make_uint4(0, 0, 0, 0);
    }
  };
#pragma unroll
  for (int i = 0; i < kDepth; ++i)
    if (i < steps) load_step(i, i);
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();

  const uint4* columns[NT];
#pragma unroll
  for (int n = 0; n < NT; ++n)
    columns[n] =
        reinterpret_cast<const uint4*>(static_cast<const T*>(p.x) + min(n * 8 + g, p.m - 1) * p.ldx + k0);
  uint4 x[kAhead][NT][2];
  const auto load_columns = [&](int slot, int step) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const bool here = k0 + step * kStep + c * 32 < p.k;
#pragma unroll
      for (int n = 0; n < NT; ++n)
        x[slot][n][c] = here ? load_x(columns[n] + step * (kStep / 8) + c * 4) : make_uint4(0, 0, 0, 0);
    }
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i)
    if (i < steps) load_columns(i, i);

  float acc[RT][NT][2][4] = {};  // two independent chains of products
#pragma unroll 1
  for (int base = 0; base < steps; base += kDepth) {
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      const int step = base + i;
      if (step >= steps) break;
#pragma unroll
      for (int c = 0; c < 2; ++c)
#pragma unroll
        for (int r = 0; r < RT; ++r) {
          const uint4 a = w[i][r][0][c], b = w[i][r][1][c];
          const uint32_t low[4] = {a.x, b.x, a.y, b.y}, high[4] = {a.z, b.z, a.w, b.w};
#pragma unroll
          for (int n = 0; n < NT; ++n) {
            const uint4 v = x[i % kAhead][n][c];
            Num<T>::mma(acc[r][n][0], low, v.x, v.y);
            Num<T>::mma(acc[r][n][1], high, v.z, v.w);
          }
        }
      if (step + kDepth < steps) load_step(i, step + kDepth);
      if (step + kAhead < steps) load_columns(i % kAhead, step + kAhead);
    }
  }

#pragma unroll
  for (int r = 0; r < RT; ++r)
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const float (&u)[4] = acc[r][n][0], (&v)[4] = acc[r][n][1];
      sums[warp * kElems + (r * NT + n) * 32 + lane] =
          make_float4(u[0] + v[0], u[1] + v[1], u[2] + v[2], u[3] + v[3]);
    }
  __syncthreads();

  const int threads = blockDim.x;
  const auto total = [&](const float4* from, int count, int e) {
    float4 sum = from[e];
    for (int i = 1; i < count; ++i) {
      const float4 v = from[i * kElems + e];
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    return sum;
  };
  const auto store = [&](int e, const float4& sum) {
    const int l = e & 31, n = e / 32 % NT, r = e / (32 * NT), i = l >> 2, column = n * 8 + (l & 3) * 2;
    const int64_t row = row_of(r, i), width = p.half ? p.half : p.n;
    const float low[2] = {sum.x, sum.y}, high[2] = {sum.z, sum.w};
    const auto value = [&](float v, int64_t at) {
      return p.bias ? v + Num<T>::to_float(static_cast<const T*>(p.bias)[at]) : v;
    };
    const auto put = [&](float v, int m, int64_t at) {
      const int64_t to = m * width + at;
      if (p.residual) v += Num<T>::to_float(static_cast<const T*>(p.residual)[to]);
      static_cast<T*>(p.y)[to] = Num<T>::round(v);
    };
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int m = column + j;
      if (m >= p.m || !is_row(r, i)) continue;
      if (p.half) {
        const float gate = value(low[j], row), up = value(high[j], row + p.half);
        put(gate / (1.f + __expf(-gate)) * up, m, row);
      } else {
        put(value(low[j], row), m, row);
        if (is_row(r, i + 8)) put(value(high[j], row + 8), m, row + 8);
      }
    }
  };

  if (split == 1) {
    for (int e = threadIdx.x; e < kElems; e += threads) store(e, total(sums, warps, e));
    return;
  }
  cluster_wait();  // the first CTA has started: its shared memory may be written
  float4* exchange = sums + warps * kElems;
  for (int e = threadIdx.x; e < kElems; e += threads) {
    const float4 v = total(sums, warps, e);
    st_cluster(mapa(smem_u32(exchange + rank * kElems + e), 0), v);
  }
  cluster_sync();
  if (rank == 0)
    for (int e = threadIdx.x; e < kElems; e += threads) store(e, total(exchange, split, e));
}

}  // namespace gm

#define GM_KERNEL(name, type, T, nt, rt)                              \
  extern "C" __global__ void __launch_bounds__(gm::kMaxWarps * 32, 1) \
      name(const __grid_constant__ DenseParams p) {                   \
    gm::linear_dense<T, nt, rt>(p);                                   \
  }
#else
#define GM_KERNEL(name, type, T, nt, rt) {type, nt, rt, {GM_CUBIN, #name}},
#endif

#define GM_KERNELS                                   \
  GM_KERNEL(dense_fp16_8_1, 1, __half, 1, 1)         \
  GM_KERNEL(dense_fp16_8_2, 1, __half, 1, 2)         \
  GM_KERNEL(dense_fp16_16_1, 1, __half, 2, 1)        \
  GM_KERNEL(dense_fp16_16_2, 1, __half, 2, 2)        \
  GM_KERNEL(dense_bf16_8_1, 2, __nv_bfloat16, 1, 1)  \
  GM_KERNEL(dense_bf16_8_2, 2, __nv_bfloat16, 1, 2)  \
  GM_KERNEL(dense_bf16_16_1, 2, __nv_bfloat16, 2, 1) \
  GM_KERNEL(dense_bf16_16_2, 2, __nv_bfloat16, 2, 2)

#ifdef __CUDACC__
GM_KERNELS
#else
#include "args.h"

namespace {

struct Instance {
  int type, nt, rt;
  gm::CudaKernel kernel;
};
Instance g_instances[] = {GM_KERNELS};

}  // namespace

// y = x . W^T + bias (gated) + residual. Returns GM_OK, or an error.
GM_CUDA_ARGS(gm_dense_decode_sm90, GmLinearDenseArgs)(const GmLinearDenseArgs* args) {
  const GmLinearDenseArgs& a = *args;
  if (a.type != 1 && a.type != 2) return GM_E_DTYPE;
  if (a.m < 0 || a.m > 16 || a.n < 1 || a.k < 8 || a.k % 8 || (a.silu_mul && a.n % 2)) return GM_E_SHAPE;
  if (a.ldx % 8 || !gm::is_aligned(a.x) || !gm::is_aligned(a.w)) return GM_E_SHAPE;
  if (a.wk < 1 || a.wk > 8 || (a.split != 1 && a.split != 2 && a.split != 4 && a.split != 8)) return GM_E_ARG;
  const int nt = a.m > 8 ? 2 : 1;
  Instance* one = nullptr;
  for (Instance& i : g_instances)
    if (i.type == a.type && i.nt == nt && i.rt == a.rt) one = &i;
  if (one == nullptr) return GM_E_ARG;
  if (a.m == 0) return GM_OK;
  DenseParams p{a.w,
                a.x,
                a.y,
                a.bias,
                a.residual,
                a.ldx,
                a.m,
                a.n,
                a.k,
                a.silu_mul ? a.n / 2 : 0,
                __builtin_ctz(unsigned(a.split))};
  const int tile = (a.silu_mul ? 8 : 16) * a.rt, rows = a.silu_mul ? a.n / 2 : a.n;
  const int64_t ctas = (int64_t(rows) + tile - 1) / tile * a.split;
  if (ctas > INT32_MAX) return GM_E_SHAPE;
  void* arguments[] = {&p};
  return one->kernel.launch(a.device, a.stream,
                            {.grid_x = unsigned(ctas),
                             .block = unsigned(a.wk * 32),
                             .smem = unsigned((a.wk + (a.split > 1 ? a.split : 0)) * nt * a.rt * 512),
                             .cluster = unsigned(a.split),
                             .pdl = a.pdl != 0},
                            arguments);
}

#endif
