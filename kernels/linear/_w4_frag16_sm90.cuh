// What the Hopper kernels over w4_frag16_v1 share: their parameters, bulk copies and barriers, decoding, x in
// shared memory, and the end of a kernel, where partial sums meet.
#pragma once
#include <cstdint>

namespace gm {

constexpr int kTileRows = 16, kTileK = 128;
constexpr int kCodeBytes = kTileRows * kTileK / 2, kTileBytes = kCodeBytes + kTileRows * 2;
constexpr int kMaxDepth = 16;

struct W4Params {
  const uint8_t* w;      // packed weights: blocks of 64 rows, [block][K / 128][tiles of the block <= 4][1056]
  const void* x;         // [M, K], row stride ldx elements
  void* y;               // [M, N], row stride N
  const void* bias;      // [N] or null
  const void* residual;  // [M, N], row stride N, or null
  const float* row_scale;  // [N], multiplies a row's sum before bias and residual; or null
  int m, n, k, ldx, tiles, groups;
  int log_split, depth;       // CTAs of a cluster that share the rows, along K; slots of a ring
  int inbox, bars;            // bytes into shared memory: of what a cluster's CTAs exchange, of barriers
  int xaligned, scales_half;  // rows of x are 16-byte aligned; scales are fp16, not bf16
};

}  // namespace gm

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace gm {

__device__ __forceinline__ uint32_t smem_u32(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Lanes of a warp that say that it is done with a slot. compute-sanitizer's racecheck sees no order in one
// lane's arrival after the other lanes' reads: it is given a build with GM_RACECHECK.
#ifdef GM_RACECHECK
constexpr int kArriving = 32;
#else
constexpr int kArriving = 1;
#endif

__device__ __forceinline__ void mbar_init(uint32_t bar, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

__device__ __forceinline__ void mbar_arrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

__device__ __forceinline__ void mbar_expect(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

__device__ __forceinline__ void mbar_wait(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nW: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra D;\nbra "
      "W;\nD:\n}" ::"r"(bar),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar,
                                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
      "[%3], %4;" ::"r"(dst),
      "l"(src), "r"(bytes), "r"(bar), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void tensor_load(uint32_t dst, const void* map, int k, int row, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3}], [%4];" ::"r"(dst),
      "l"(map), "r"(k), "r"(row), "r"(bar)
      : "memory");
}

template <typename T>
struct Num;
template <>
struct Num<__nv_bfloat16> {
  static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                             const float (&c)[4]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]),
          "f"(c[3]));
  }
  static __device__ __forceinline__ __nv_bfloat16 round(float v) { return __float2bfloat16_rn(v); }
  static __device__ __forceinline__ float wide(__nv_bfloat16 v) { return __bfloat162float(v); }
};
template <>
struct Num<__half> {
  static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                             const float (&c)[4]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]),
          "f"(c[3]));
  }
  static __device__ __forceinline__ __half round(float v) { return __float2half_rn(v); }
  static __device__ __forceinline__ float wide(__half v) { return __half2float(v); }
};

// A slot of x holds x[:, k0 : k0 + 128] as two halves of 64 k, each of rows of 128 bytes whose eight 16-byte
// chunks are permuted by exclusive or with the row (the tensor cores' 128-byte swizzle): eight rows of a
// chunk meet no bank twice.
__device__ __forceinline__ uint32_t x_offset(int rows, int row, int chunk) {
  return (chunk >> 3) * rows * 128 + row * 128 + ((chunk ^ row) & 7) * 16;
}

// A warp copies x to shared memory, with zeros past K. x may be any address: where its rows are not 16-byte
// aligned it copies element by element.
template <typename T>
__device__ __noinline__ void load_elements(const T* x, int m, int k, int ldx, uint32_t slot, int k0,
                                           int lane) {
  for (int c = lane; c < m * kTileK; c += 32) {
    const int row = c >> 7, i = c & (kTileK - 1);
    const T v = k0 + i < k ? x[static_cast<int64_t>(row) * ldx + k0 + i] : T(0.f);
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(slot + x_offset(m, row, i >> 3) + (i & 7) * 2),
                 "h"(*reinterpret_cast<const uint16_t*>(&v))
                 : "memory");
  }
}

template <typename T, int NT>
struct XLoader {
  const char* src;  // this lane's 16 bytes of its first row, at the next k to be loaded
  int k, row, rows, row_step, lane;
  uint32_t slots;

  __device__ __forceinline__ XLoader(const W4Params& p, uint32_t slots, int k0, int lane)
      : lane(lane), slots(slots) {
    row = lane >> 4, k = k0 + (lane & 15) * 8;
    rows = (p.m - row + 1) / 2;
    row_step = 4 * p.ldx;
    src = static_cast<const char*>(p.x) + (static_cast<int64_t>(row) * p.ldx + k) * 2;
  }
  // Copies x[:, 128] to the slot at byte offset `slot` and moves on by `groups` groups of 128.
  __device__ __forceinline__ void load(const W4Params& p, uint32_t slot, int groups) {
    if (p.xaligned) {                                      // 16 lanes a row
      const uint32_t bytes = max(0, min(8, p.k - k)) * 2;  // the rest is filled with zeros
#pragma unroll
      for (int i = 0; i < NT * 4; ++i)
        if (i < rows)
          asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                           slots + slot + x_offset(p.m, row + i * 2, lane & 15)),
                       "l"(bytes ? src + static_cast<int64_t>(i) * row_step : static_cast<const char*>(p.x)),
                       "r"(bytes)
                       : "memory");
    } else {
      load_elements<T>(static_cast<const T*>(p.x), p.m, p.k, p.ldx, slots + slot, k - (lane & 15) * 8, lane);
    }
    src += groups * (kTileK * 2), k += groups * kTileK;
  }
};

// The last part of a kernel: scratch holds, for each of SLICES parts of K, TILES x NT x 32 float4, the
// accumulators of a lane of the matrix instruction. Adds the parts in order, exchanges sums between the CTAs
// of a cluster (each owns a share, and adds in the order of ranks), and writes y. smem + p.inbox: memory
// behind the sums for that; the CTAs have arrived at the cluster's barrier since they used what else lies
// there.
template <typename T, int NT, int TILES, int SLICES, int THREADS>
__device__ __forceinline__ void finish_sums(const W4Params& p, uint8_t* smem, int tile0, int rank) {
  constexpr int kElems = TILES * NT * 32;
  const float4* scratch = reinterpret_cast<const float4*>(smem);
  float4* inbox = reinterpret_cast<float4*>(smem + p.inbox);
  const int split = 1 << p.log_split;
  __syncthreads();
  const auto local_sum = [&](int e) {
    float4 sum = scratch[e];
#pragma unroll
    for (int w = 1; w < SLICES; ++w) {
      const float4 v = scratch[w * kElems + e];
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    return sum;
  };
  const bool finishing = p.bias != nullptr || p.residual != nullptr || p.row_scale != nullptr;
  const auto store = [&](int e, const float4& v) {
    const int l = e & 31, n = e / 32 % NT, row = (tile0 + e / (32 * NT)) * kTileRows + (l >> 2),
              m = n * 8 + (l & 3) * 2;
    if (m >= p.m || row >= p.n) return;
    const float value[4] = {v.x, v.y, v.z, v.w};
    const int64_t first = static_cast<int64_t>(m) * p.n + row;
    const bool there[4] = {true, m + 1 < p.m, row + 8 < p.n, m + 1 < p.m && row + 8 < p.n};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!there[i]) continue;
      const int64_t at = first + (i & 1) * p.n + (i >> 1) * 8;
      float sum = value[i];
      if (finishing) {
        if (p.row_scale) sum *= p.row_scale[row + (i >> 1) * 8];
        if (p.bias) sum += Num<T>::wide(static_cast<const T*>(p.bias)[row + (i >> 1) * 8]);
        if (p.residual) sum += Num<T>::wide(static_cast<const T*>(p.residual)[at]);
      }
      static_cast<T*>(p.y)[at] = Num<T>::round(sum);
    }
  };

  if (split == 1) {
    for (int e = threadIdx.x; e < kElems; e += THREADS) store(e, local_sum(e));
    return;
  }
  asm volatile("barrier.cluster.wait.aligned;" ::
                   : "memory");  // every CTA of the cluster is done with its rings: they may be written to
  const int share = kElems >> p.log_split;
  for (int e = threadIdx.x; e < kElems; e += THREADS) {
    const float4 v = local_sum(e);
    const int owner = e / share;
    uint32_t dst = smem_u32(inbox + rank * share + e - owner * share);
    asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(dst) : "r"(owner));
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(dst), "f"(v.x), "f"(v.y), "f"(v.z),
                 "f"(v.w)
                 : "memory");
  }
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  for (int e = threadIdx.x; e < share; e += THREADS) {
    float4 sum = inbox[e];
    for (int s = 1; s < split; ++s) {
      const float4 v = inbox[s * share + e];
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    store(rank * share + e, sum);
  }
}

}  // namespace gm
#endif
