// Paged attention for few rows of each sequence on Hopper: decode, and speculative verification.
//
// Keys are the rows of the products, and the query-head pairs of a KV head their columns, 8 of them, so
// that a head of a small group wastes little: S^T = K Q^T and O^T = V^T P^T by mma.sync.m16n8k16 (the
// transposed product of TensorRT-LLM's XQA; ETAP, arXiv:2506.01969). Each warp takes steps of 16 keys through
// a ring of its own, which cp.async fills ahead, and meets the other warps only at the end of a context.
//
// The work of a KV head is one row of steps of 16 keys, sequence after sequence. It is cut into equal pieces,
// and a CTA takes one piece of one KV head (stream-K; LeanAttention, arXiv:2405.10480), which it derives from
// the lengths; the KV heads of a piece, neighbours in memory, are read at the same time. A context that is
// cut leaves partial results in the workspace; the CTA that arrives last adds them in the order of the keys.
// So a launch needs no plan, its result does not depend on timing, and a captured graph stays right when
// lengths change.
#pragma once
#include "_attention_parts_sm90.cuh"
#include "_paged_decode_copy_sm90.cuh"

#ifdef __CUDACC__
namespace gm {

template <typename T>
__device__ __forceinline__ void multiply_add(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                             uint32_t a3, uint32_t b0, uint32_t b1);
#define GM_MMA(T, TYPE)                                                                                 \
  template <>                                                                                           \
  __device__ __forceinline__ void multiply_add<T>(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, \
                                                  uint32_t a3, uint32_t b0, uint32_t b1) {              \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                                          \
        ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                          \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                \
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));                                        \
  }
GM_MMA(__nv_bfloat16, "bf16")
GM_MMA(__half, "f16")
#undef GM_MMA

// An 8 by 8 matrix of 16-bit elements, a row in four lanes, transposed.
__device__ __forceinline__ uint32_t transposed(uint32_t pair) {
  uint32_t r;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(pair));
  return r;
}

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
// Sums of a warp over its steps: of rows 8 n + 2 t and the next one, in units of the raw scores.
template <int D, int N>
struct DecodeSums {
  float o[D / 16][N / 8][4], m[N / 8][2], l[N / 8][2];
};

// One step: weights of 16 keys, then their values. tile: of this step, keys before values. key: of this
// lane's first row; limit: keys that the first query sees.
template <typename T, int D, int N>
__device__ __forceinline__ void decode_step(DecodeSums<D, N>& sums, uint32_t q, uint32_t tile,
                                            float scale_log2, bool whole, int key, int limit, int window,
                                            uint32_t by_group) {
  constexpr int kRow = D * 2 + 16;
  const int lane = threadIdx.x & 31, t = lane & 3;
  const uint32_t keys = tile + (lane & 15) * kRow + (lane >> 4) * 16,
                 values = tile + (16 + (lane & 7) + (lane >> 4) * 8) * kRow + (lane >> 3 & 1) * 16;
  uint32_t weights[N / 8][2];
  float factor[N / 8][2];
  bool grown = false;
  float s[N / 8][2][4] = {};  // summed over even and odd pieces of 16 elements, for two chains
#pragma unroll
  for (int j = 0; j < D / 16; ++j) {
    uint32_t a[4];
    load_matrices(a, keys + j * 32);
#pragma unroll
    for (int n = 0; n < N / 8; n += 2) {
      uint32_t b[4];  // of 8 rows in the first lanes, of the next 8 in the others; N = 8: the same ones
      load_matrices(
          b, q + (n * 8 + (lane & 7) + (N > 8 ? lane >> 4 : 0) * 8) * kRow + (lane >> 3 & 1) * 16 + j * 32);
      multiply_add<T>(s[n][j & 1], a[0], a[1], a[2], a[3], b[0], b[1]);
      if constexpr (N > 8) multiply_add<T>(s[n + 1][j & 1], a[0], a[1], a[2], a[3], b[2], b[3]);
    }
  }
#pragma unroll
  for (int n = 0; n < N / 8; ++n) {
    float (&c)[4] = s[n][0];
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] += s[n][1][i];
    if (!whole) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int seen = limit + static_cast<int>((n * 8 + t * 2 + (i & 1)) * by_group >> 16);
        const int at = key + (i >> 1) * 8;
        if (at >= seen || (window > 0 && at < seen - window)) c[i] = -INFINITY;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = fmaxf(c[r], c[r + 2]);
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2)
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, lanes));
      const float m = fmaxf(most, sums.m[n][r]), base = m == -INFINITY ? 0.f : __fmul_rn(m, scale_log2);
      factor[n][r] = most > sums.m[n][r] ? exp2_fast(__fmul_rn(sums.m[n][r], scale_log2) - base) : 1.f;
      grown = grown || most > sums.m[n][r];
      sums.m[n][r] = m;
      c[r] = exp2_fast(fmaf(c[r], scale_log2, -base));
      c[r + 2] = exp2_fast(fmaf(c[r + 2], scale_log2, -base));
      sums.l[n][r] = fmaf(sums.l[n][r], factor[n][r], c[r] + c[r + 2]);
    }
    weights[n][0] = transposed(packed<T>(c[0], c[1]));
    weights[n][1] = transposed(packed<T>(c[2], c[3]));
  }
  if (__any_sync(0xffffffffu, grown)) {
#pragma unroll
    for (int i = 0; i < D / 16; ++i)
#pragma unroll
      for (int n = 0; n < N / 8; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) sums.o[i][n][c] *= factor[n][c & 1];
  }
#pragma unroll
  for (int i = 0; i < D / 16; ++i) {
    uint32_t a[4];
    load_transposed(a, values + i * 32);
#pragma unroll
    for (int n = 0; n < N / 8; ++n)
      multiply_add<T>(sums.o[i][n], a[0], a[1], a[2], a[3], weights[n][0], weights[n][1]);
  }
}

// The sums of the warps to one, and that to the output or, where the context goes on in other CTAs, to the
// workspace; the CTA that is the last one to do so adds what all have left there.
template <typename T, int D, int N>
__device__ __forceinline__ void finish(const DecodeParams& p, uint8_t* smem, DecodeSums<D, N>& sums,
                                       const Stretch& at, int start, int piece_steps, bool worked) {
  using S = DecodeShape<D, N>;
  const int warp = threadIdx.x >> 5, g = threadIdx.x >> 2 & 7, t = threadIdx.x & 3;
  float* o = reinterpret_cast<float*>(smem + S::kSums);
  float2* ends = reinterpret_cast<float2*>(smem + S::kEnds);
  __shared__ bool last;
  __syncthreads();  // the rings are empty
#pragma unroll
  for (int n = 0; n < N / 8; ++n)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2)
        sums.l[n][r] += __shfl_xor_sync(0xffffffffu, sums.l[n][r], lanes);
      const int row = warp * N + n * 8 + t * 2 + r;
      if (g == 0) ends[row] = make_float2(sums.m[n][r], sums.l[n][r]);
      if (worked) {
#pragma unroll
        for (int i = 0; i < D / 8; ++i) o[row * S::kPitch + i * 8 + g] = sums.o[i / 2][n][r + i % 2 * 2];
      }
    }
  __syncthreads();
  const int rows = min(at.seq.queries * p.group, N);
  // The first and the last piece that have some of the context.
  const int first = start / piece_steps, final = (start + at.seq.steps - 1) / piece_steps;
  const bool whole = first == final;
  constexpr int kPart = N * (D + 2);     // floats of a part
  const auto part_at = [&](int piece) {  // of the first piece of a context, the second of its two
    return p.parts + static_cast<int64_t>((piece * p.kv_heads + at.head) * 2 + (piece == first)) * kPart;
  };
  float* own = part_at((start + at.from) / piece_steps);
#pragma unroll 1
  for (int i = threadIdx.x; i < rows * (D / 4); i += S::kThreads) {
    const int row = i / (D / 4), element = i % (D / 4) * 4;
    RowPart sum{make_float4(0.f, 0.f, 0.f, 0.f), -INFINITY, 0.f};
#pragma unroll
    for (int w = 0; w < S::kWarps; ++w) {
      const float2 end = ends[w * N + row];
      if (end.x == -INFINITY) continue;
      RowPart part{*reinterpret_cast<const float4*>(o + (w * N + row) * S::kPitch + element), end.x, end.y};
      add_before(part, sum, p.scale_log2);
      sum = part;
    }
    if (whole) {
      write_part<T>(p, at.seq.token, at.head, row, element, sum);
    } else {
      __stcg(reinterpret_cast<float4*>(own + row * D + element), sum.o);
      if (element == 0) __stcg(reinterpret_cast<float2*>(own + N * D) + row, make_float2(sum.m, sum.l));
    }
  }
  if (whole) return;
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned* counter = p.counters + first * p.kv_heads + at.head;
    last = arrive_at(counter) == static_cast<unsigned>(final - first);
    if (last) *counter = 0;
  }
  __syncthreads();
  if (!last) return;
  write_parts<T, D, 16>(
      p, at.seq.token, at.head, rows, final - first + 1, threadIdx.x, S::kThreads, [&](int part, int row) {
        const float* from = part_at(first + part);
        return PartPlace{from + row * D, reinterpret_cast<const float2*>(from + N * D) + row};
      });
}

template <typename T, int D, int N>
__device__ __forceinline__ void run_stretch(const DecodeParams& p, uint8_t* smem, const Stretch& at,
                                            int start, int piece_steps) {
  using S = DecodeShape<D, N>;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), g = threadIdx.x >> 2 & 7;
  const DecodeSequence& seq = at.seq;
  const int* row = p.table + at.index * p.table_row;
  const char* k = static_cast<const char*>(p.k) + at.head * p.k_head;
  const char* v = static_cast<const char*>(p.v) + at.head * p.v_head;
  const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
  const uint32_t ring = base + S::kRing + warp * (S::kStages * 2 * S::kTile);
  int step = seq.first + at.from + warp;
  const int stop = seq.context > 0 ? seq.first + at.from + at.count : step;
  KeyPlaces places[S::kStages];
#pragma unroll
  for (int i = 0; i < S::kStages; ++i)
    places[i] = find_keys(p, row, seq, step + i * S::kWarps, step + i * S::kWarps < stop);
  __syncthreads();  // what the stretch before left in shared memory has been read
#pragma unroll
  for (int i = 0; i < S::kStages; ++i) {
    if (step + i * S::kWarps < stop)
      copy_step<D>(p, seq, step + i * S::kWarps, k, v, places[i], ring + i * (2 * S::kTile));
    if (i == 0) copy_queries<D, N>(p, base + S::kQ, at);
    copies_commit();
  }
  int ahead = step + S::kStages * S::kWarps;  // the next step to be copied
  KeyPlaces next = find_keys(p, row, seq, ahead, ahead < stop);
  DecodeSums<D, N> sums;
#pragma unroll
  for (int n = 0; n < N / 8; ++n)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sums.m[n][r] = -INFINITY, sums.l[n][r] = 0.f;
#pragma unroll
      for (int i = 0; i < D / 16; ++i) sums.o[i][n][r] = sums.o[i][n][r + 2] = 0.f;
    }
  const bool works = step < stop;
  const int limit = seq.context - seq.queries + 1;
  copies_wait<S::kStages - 1>();
  __syncthreads();  // Q is there
  uint32_t tile = ring;
#pragma unroll 1
  for (; step < stop; step += S::kWarps) {
    const int key = step * S::kStep;
    const bool whole = key + S::kStep <= limit && (p.window <= 0 || key >= seq.context - p.window);
    copies_wait<S::kStages - 1>();
    __syncwarp();
    decode_step<T, D, N>(sums, base + S::kQ, tile, p.scale_log2, whole, key + g, limit, p.window, p.by_group);
    __syncwarp();
    if (ahead < stop) copy_step<D>(p, seq, ahead, k, v, next, tile);
    copies_commit();
    ahead += S::kWarps;
    next = find_keys(p, row, seq, ahead, ahead < stop);
    tile = tile + 2 * S::kTile == ring + S::kStages * 2 * S::kTile ? ring : tile + 2 * S::kTile;
  }
  copies_wait<0>();
  finish<T, D, N>(p, smem, sums, at, start, piece_steps, works);
}

// The steps of a KV head before, of and in the sequences of this thread, 0 .. seqs by blocks of `chunk`.
struct StepSums {
  int before, all;
};

// Sums over all threads; totals: of S::kWarps warps. By all threads.
__device__ __forceinline__ StepSums sum_steps(int mine, int* totals, int warps) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int sum = mine;
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, sum, lanes);
    if (lane >= lanes) sum += other;
  }
  if (lane == 31) totals[warp] = sum;
  __syncthreads();
  StepSums sums{sum - mine, 0};
  for (int w = 0; w < warps; ++w) {
    if (w < warp) sums.before += totals[w];
    sums.all += totals[w];
  }
  return sums;
}

template <typename T, int D, int N>
__device__ __forceinline__ void paged_decode(const DecodeParams& p) {
  using S = DecodeShape<D, N>;
  extern __shared__ __align__(16) uint8_t smem[];
  __shared__ int totals[S::kWarps], found[2];
  const int tid = threadIdx.x, piece = blockIdx.x / p.kv_heads;
  Stretch at;
  at.head = blockIdx.x - piece * p.kv_heads;
  after_previous_kernel();
  const int chunk = (p.seqs + S::kThreads - 1) / S::kThreads;  // sequences of a thread
  int mine = 0;
  for (int i = tid * chunk; i < min((tid + 1) * chunk, p.seqs); ++i) mine += decode_sequence(p, i).steps;
  const StepSums sums = sum_steps(mine, totals, S::kWarps);
  const int piece_steps = max((sums.all + p.pieces - 1) / p.pieces, S::kWarps);
  int step = piece * piece_steps;
  const int stop = min(step + piece_steps, sums.all);
  if (step >= stop) return;
  if (sums.before <= step && step < sums.before + mine) found[0] = tid * chunk, found[1] = sums.before;
  __syncthreads();
  at.index = found[0];
  int start = found[1];  // steps before the sequence
  at.seq = decode_sequence(p, at.index);
  while (start + at.seq.steps <= step) {
    start += at.seq.steps;
    at.seq = decode_sequence(p, ++at.index);
  }
  while (true) {
    at.from = step - start, at.count = min(stop, start + at.seq.steps) - step;
    run_stretch<T, D, N>(p, smem, at, start, piece_steps);
    step += at.count;
    if (step >= stop) return;
    start = step;
    do at.seq = decode_sequence(p, ++at.index);
    while (at.seq.steps == 0);
  }
}

}  // namespace gm
#endif
