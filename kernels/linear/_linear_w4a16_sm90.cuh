// Weight-only 4-bit linear for Hopper, small M: y[M,N] = x[M,K] · W[N,K]ᵀ, float32 accumulation.
//
// How it works, and why:
//  - W is the A operand of mma.m16n8k16 and x the B operand, so that the 16-wide side is N and the 8-wide side is M: at M = 1
//    seven eighths of the products are wasted, but the tensor core is idle anyway and the float units do not become the limit.
//  - The weights lie in memory in fragment order (layout w4_frag16_v1: tiles of 16 rows x 128 k, 1024 bytes of codes and then
//    32 bytes of scales). A tile is one bulk copy from global to shared memory, and each lane gets its codes by two 16-byte loads.
//  - Every warp owns a slice of K and a private ring of tiles in shared memory, fills it itself and empties it itself: no barrier
//    between warps until the end. One hundred kilobytes a CTA are in flight.
//  - Codes 0..15 become bf16 128..143 (fp16 1024..1039) by one shift and one logic operation for two values; the offset leaves
//    through the accumulator: the first product of a group starts from -(128 + 8)·Σx, which is itself a product of x with a constant
//    matrix, shared by all tiles of the warp. Scales multiply the float32 accumulator once per group.
//  - Partial sums of the warps meet in shared memory, those of a cluster's CTAs (split-K) in the owner's shared memory, in a fixed
//    order: the result is bitwise reproducible.
//  - Weights are immutable, so their copies start before griddepcontrol.wait; x is read after it.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstdint>

namespace gm {

constexpr int kTileRows = 16, kTileK = 128;
constexpr int kCodeBytes = kTileRows * kTileK / 2, kTileBytes = kCodeBytes + kTileRows * 2;
constexpr int kMaxDepth = 16;

struct W4Params {
  const uint8_t* w;  // packed weights: blocks of 64 rows, [block][ceil(K/128)][tiles of the block <= 4][1056]
  const void* x;     // [M, K], row stride ldx elements
  void* y;           // [M, N], row stride ldy elements
  int m, n, k, ldx, ldy, tiles, groups;
  int log_split, depth, inbox, xaligned;  // CTAs of a cluster that share the rows, along K; slots of a warp's ring; offset; rows of x 16-byte aligned
};

__device__ __forceinline__ uint32_t smem_u32(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

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
      "{\n.reg .pred p;\nW: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra D;\nbra W;\nD:\n}" ::"r"(bar), "r"(parity)
      : "memory");
}

__device__ __forceinline__ void bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(dst),
      "l"(src), "r"(bytes), "r"(bar), "l"(policy)
      : "memory");
}

template <typename T>
struct Num;
template <>
struct Num<__nv_bfloat16> {
  static constexpr uint32_t magic = 0x43004300u, minus = 0xC308C308u;  // 128 and -(128 + 8)
  static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const float (&c)[4]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
  }
  static __device__ __forceinline__ __nv_bfloat16 round(float v) { return __float2bfloat16_rn(v); }
};
template <>
struct Num<__half> {
  static constexpr uint32_t magic = 0x64006400u, minus = 0xE408E408u;  // 1024 and -(1024 + 8)
  static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const float (&c)[4]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
  }
  static __device__ __forceinline__ __half round(float v) { return __float2half_rn(v); }
};

// Two codes of the word, those at bits 4i and 16 + 4i, as a pair of 16-bit floats offset by 128 (bf16) or 1024 (fp16).
template <typename T, int I>
__device__ __forceinline__ uint32_t two_codes(uint32_t word) {
  uint32_t out;
  asm("lop3.b32 %0, %1, 0x000f000f, %2, 0xEA;" : "=r"(out) : "r"(word >> (4 * I)), "r"(Num<T>::magic));
  return out;
}

// The WARPS warps that work on the same k copy x[:, k0 : k0 + 128] to shared memory, rows kXStride bytes apart, zeros past K. x may be any address: where its
// rows are not 16-byte aligned they copy element by element.
constexpr int kXStride = kTileK * 2 + 64;  // 64 bytes of padding: 8 rows x 4 lanes x 16 bytes meet no bank twice in a phase

template <typename T, int NT, int WARPS>
__device__ __forceinline__ void load_x(const W4Params& p, uint8_t* dst, int k0, int thread) {
  if (p.xaligned) {  // 16 threads a row
    const int row = thread >> 4, k = k0 + (thread & 15) * 8;
    const uint32_t bytes = k < p.k ? 16 : 0;  // 0 fills with zeros
    const T* src = static_cast<const T*>(p.x) + (bytes ? static_cast<int64_t>(row) * p.ldx + k : 0);
    const int64_t step = bytes ? 2 * WARPS * static_cast<int64_t>(p.ldx) : 0;
    const uint32_t to = smem_u32(dst + row * kXStride + (thread & 15) * 16);
#pragma unroll
    for (int i = 0; i < (NT * 4 + WARPS - 1) / WARPS; ++i)
      if (i * 2 * WARPS + row < p.m)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + i * 2 * WARPS * kXStride), "l"(src + i * step), "r"(bytes)
                     : "memory");
  } else {
    const T* x = static_cast<const T*>(p.x) + k0;
#pragma unroll 1
    for (int c = thread; c < p.m * kTileK; c += WARPS * 32) {
      const int row = c >> 7, k = c & (kTileK - 1);
      reinterpret_cast<T*>(dst + row * kXStride)[k] = k0 + k < p.k ? x[static_cast<int64_t>(row) * p.ldx + k] : T(0.f);
    }
  }
}

// NT: columns of x in eights.  RT: tiles of 16 rows per warp.  C: tiles of a slot.  WN x WK: warps along N and along K.  NX: slots of x.
// MINB: CTAs a multiprocessor holds.
template <typename T, int NT, int RT, int C, int WN, int WK, int NX, int MINB>
__global__ void __launch_bounds__(WN* WK * 32, MINB) w4_frag16_kernel(const __grid_constant__ W4Params p) {
  constexpr int kWarps = WN * WK, kSub = (RT + C - 1) / C, kSlot = C * kTileBytes;
  constexpr int kElems = WN * RT * NT * 32;  // float4 of sums a CTA
  constexpr int CH = NT == 1 ? 2 : 1, TP = NT <= 2 ? 2 : 1;  // chains of products a tile, tiles at a time: four independent chains
  extern __shared__ __align__(128) uint8_t smem[];
  __shared__ __align__(8) uint64_t bars[kWarps][kMaxDepth];
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int wn = warp % WN, wk = warp / WN, depth = p.depth;
  const int split = 1 << p.log_split, rank = blockIdx.x & (split - 1), block = blockIdx.x >> p.log_split;
  const int kb0 = (p.groups * rank) >> p.log_split, kb1 = (p.groups * (rank + 1)) >> p.log_split;
  const int steps = max(0, (kb1 - kb0 - wk + WK - 1) / WK), chunks = steps * kSub;
  const int xslot = p.m * kXStride;
  uint8_t* ring = smem + warp * depth * kSlot;
  uint8_t* xs = smem + kWarps * depth * kSlot + wk * NX * xslot;
  const int xthread = wn * 32 + lane;
  const uint32_t bar0 = smem_u32(&bars[warp][0]);

  // The warp's part of the weights: a group fills kSub slots of C tiles, each from up to three blocks of 64 rows; lane 3 i + j
  // copies what slot i takes from its j-th block.
  const int sub_of_lane = lane / 3, first = (block * WN + wn) * RT + sub_of_lane * C;
  const int last = min(min(first + C, (block * WN + wn) * RT + RT), p.tiles);  // rows past the end are not copied and never stored
  const int base = (first & ~3) + lane % 3 * 4, from = max(first, base), till = min(last, base + 4), in_block = min(4, p.tiles - base);
  const int bytes = sub_of_lane < kSub && till > from ? (till - from) * kTileBytes : 0, total = max(0, last - first) * kTileBytes;
  const uint8_t* src = p.w + (static_cast<int64_t>(base) * p.groups + (kb0 + wk) * in_block + (from - base)) * kTileBytes;
  const int stride = WK * in_block * kTileBytes;
  const uint32_t dst = smem_u32(ring) + (from - first) * kTileBytes;
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  const auto issue = [&](int slot, int sub) {
    if (sub_of_lane == sub) {
      if (lane % 3 == 0) mbar_expect(bar0 + 8 * slot, total);
      if (bytes > 0) {
        bulk_load(dst + slot * kSlot, src, bytes, bar0 + 8 * slot, policy);
        src += stride;
      }
    }
  };
  if (lane == 0) {
#pragma unroll 1
    for (int s = 0; s < depth; ++s) mbar_init(bar0 + 8 * s, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncwarp();
#pragma unroll 1
  for (int s = 0; s < depth && s < chunks; s += kSub)
#pragma unroll
    for (int i = 0; i < kSub; ++i) issue(s + i, i);
  __syncwarp();
  if (split > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");

#pragma unroll
  for (int i = 0; i < NX - 1; ++i) {
    if (i < steps) load_x<T, NT, WN>(p, xs + i * xslot, (kb0 + wk + i * WK) * kTileK, xthread);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  float acc[RT][NT][4];
#pragma unroll
  for (int r = 0; r < RT; ++r)
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[r][n][i] = 0.f;

  int slot = 0, next = depth, xi = 0, xfree = NX - 1;
  uint32_t parity = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    asm volatile("cp.async.wait_group %0;" ::"n"(NX - 2) : "memory");
    if constexpr (WN == 1)
      __syncwarp();
    else
      asm volatile("bar.sync %0, %1;" ::"r"(wk + 1), "n"(WN * 32) : "memory");
    // Everyone has this step's x, and nobody reads the previous one's any more.
    if (step + NX - 1 < steps) load_x<T, NT, WN>(p, xs + xfree * xslot, (kb0 + wk + (step + NX - 1) * WK) * kTileK, xthread);
    asm volatile("cp.async.commit_group;" ::: "memory");
    uint4 x[NT][4];
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        x[n][j] = make_uint4(0, 0, 0, 0);
        if (n * 8 + g < p.m) x[n][j] = *reinterpret_cast<const uint4*>(xs + xi * xslot + (n * 8 + g) * kXStride + j * 64 + t * 16);
      }
    xfree = xi;
    if (++xi == NX) xi = 0;

    const uint32_t minus[4] = {Num<T>::minus, Num<T>::minus, Num<T>::minus, Num<T>::minus};
    float init[NT][4];  // -(offset + 8) · Σx of the group for columns 2t and 2t + 1; the same in every row
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      float odd[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int i = 0; i < 4; ++i) init[n][i] = 0.f;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        Num<T>::mma(init[n], minus, x[n][j].x, x[n][j].y, init[n]);
        Num<T>::mma(odd, minus, x[n][j].z, x[n][j].w, odd);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) init[n][i] += odd[i];
    }
#pragma unroll
    for (int sub = 0; sub < kSub; ++sub) {
      mbar_wait(bar0 + 8 * slot, parity);
      const uint8_t* chunk = ring + slot * kSlot;
#pragma unroll
      for (int c0 = 0; c0 < C && sub * C + c0 < RT; c0 += TP) {
        constexpr bool kLate = true;
        const bool late = kLate && sub == 0 && c0 == 0;  // the first tiles of a group do not wait for Σx
        uint4 q[TP][2];
        uint32_t sc[TP];
#pragma unroll
        for (int c = 0; c < TP; ++c) {
          if (c0 + c >= C || sub * C + c0 + c >= RT) continue;
          const uint8_t* tile = chunk + (c0 + c) * kTileBytes;
          q[c][0] = reinterpret_cast<const uint4*>(tile)[lane];
          q[c][1] = reinterpret_cast<const uint4*>(tile)[32 + lane];
          sc[c] = reinterpret_cast<const uint32_t*>(tile + kCodeBytes)[g];
        }
        float part[TP][CH][NT][4];
#pragma unroll
        for (int c = 0; c < TP; ++c)
#pragma unroll
          for (int h = 0; h < CH; ++h)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
              for (int i = 0; i < 4; ++i) part[c][h][n][i] = h == CH - 1 && !late ? init[n][i] : 0.f;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int h = j % CH;
#pragma unroll
          for (int c = 0; c < TP; ++c) {
            if (c0 + c >= C || sub * C + c0 + c >= RT) continue;
            const uint4& w = q[c][j >> 1];
            const uint32_t lo = j & 1 ? w.z : w.x, hi = j & 1 ? w.w : w.y;  // rows g and g + 8, 8 codes each
            const uint32_t a[4] = {two_codes<T, 0>(lo), two_codes<T, 0>(hi), two_codes<T, 1>(lo), two_codes<T, 1>(hi)};
            const uint32_t b[4] = {two_codes<T, 2>(lo), two_codes<T, 2>(hi), two_codes<T, 3>(lo), two_codes<T, 3>(hi)};
#pragma unroll
            for (int n = 0; n < NT; ++n) Num<T>::mma(part[c][h][n], a, x[n][j].x, x[n][j].y, part[c][h][n]);
#pragma unroll
            for (int n = 0; n < NT; ++n) Num<T>::mma(part[c][h][n], b, x[n][j].z, x[n][j].w, part[c][h][n]);
          }
        }
#pragma unroll
        for (int c = 0; c < TP; ++c) {
          if (c0 + c >= C || sub * C + c0 + c >= RT) continue;
          const float s[2] = {__uint_as_float(sc[c] << 16), __uint_as_float(sc[c] & 0xffff0000u)};
#pragma unroll
          for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              float sum = part[c][0][n][i];
              if constexpr (CH == 2) sum += part[c][1][n][i];
              if (late) sum += init[n][i];
              acc[sub * C + c0 + c][n][i] += s[i >> 1] * sum;
            }
        }
      }
      __syncwarp();  // every lane has read the slot
      if (next < chunks) issue(slot, sub);
      ++next;
      if (++slot == depth) slot = 0, parity ^= 1;
    }
  }

  __syncthreads();  // the rings are drained; their memory now takes the warps' sums
  float4* scratch = reinterpret_cast<float4*>(smem);
  float4* inbox = reinterpret_cast<float4*>(smem + p.inbox);  // split-K sums from the cluster: memory that nothing else uses
#pragma unroll
  for (int r = 0; r < RT; ++r)
#pragma unroll
    for (int n = 0; n < NT; ++n)
      scratch[((wk * WN + wn) * RT * NT + r * NT + n) * 32 + lane] = make_float4(acc[r][n][0], acc[r][n][1], acc[r][n][2], acc[r][n][3]);
  __syncthreads();

  const auto local_sum = [&](int e) {
    float4 sum = scratch[e];
#pragma unroll
    for (int w = 1; w < WK; ++w) {
      const float4 v = scratch[w * kElems + e];
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    return sum;
  };
  const auto store = [&](int e, const float4& v) {
    const int l = e & 31, n = e / 32 % NT, r = e / (32 * NT) % RT, nw = e / (32 * NT * RT);
    const int row = ((block * WN + nw) * RT + r) * kTileRows + (l >> 2), m = n * 8 + (l & 3) * 2;
    T* y = static_cast<T*>(p.y) + row;
    if (m < p.m) {
      if (row < p.n) y[static_cast<int64_t>(m) * p.ldy] = Num<T>::round(v.x);
      if (row + 8 < p.n) y[static_cast<int64_t>(m) * p.ldy + 8] = Num<T>::round(v.z);
    }
    if (m + 1 < p.m) {
      if (row < p.n) y[static_cast<int64_t>(m + 1) * p.ldy] = Num<T>::round(v.y);
      if (row + 8 < p.n) y[static_cast<int64_t>(m + 1) * p.ldy + 8] = Num<T>::round(v.w);
    }
  };

  if (split == 1) {
    for (int e = threadIdx.x; e < kElems; e += kWarps * 32) store(e, local_sum(e));
    return;
  }
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");  // every CTA of the cluster has started: its memory may be written
  const int share = kElems >> p.log_split;
  for (int e = threadIdx.x; e < kElems; e += kWarps * 32) {
    const float4 v = local_sum(e);
    const int owner = e / share;
    uint32_t dst = smem_u32(inbox + rank * share + e - owner * share);
    asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(dst) : "r"(owner));
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(dst), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
  }
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  for (int e = threadIdx.x; e < share; e += kWarps * 32) {
    float4 sum = inbox[e];
    for (int s = 1; s < split; ++s) {
      const float4 v = inbox[s * share + e];
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    store(rank * share + e, sum);
  }
}

}  // namespace gm
