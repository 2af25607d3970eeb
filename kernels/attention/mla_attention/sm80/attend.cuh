// Absorbed latent attention over a paged cache on sm_80 and newer: decodes, speculative tokens and chunks.
//
// Keys and values are the same memory (FlashMLA, DeepSeek, 2025): a step of 32 keys lies in shared memory once. The queries of a tile stay in
// registers as A operands of mma.sync.m16n8k16, divided along their 576 elements: a warp multiplies a quarter of them, 16 of every 64, by half of
// the keys of a step, so that a key is read once for all rows. The quarters are added in shared memory by eight threads of each row, which keep the row's
// maximum and sum of weights. Then each warp multiplies all weights by 64 of the 512 columns of the values. While a step is multiplied,
// cp.async copies the next one. Rows of shared memory are swizzled by 16-byte chunks, so that ldmatrix has no bank conflicts.
#pragma once
#include "attention/sm90/_attention_parts_sm90.cuh"
#include "sm80/cp_async.cuh"
#include "sm90/mma.cuh"
#include "work.cuh"

#ifdef __CUDACC__
namespace gm::mla80 {

template <typename T, int TILES>
struct Attend {
  using S = Shape<TILES>;
  static constexpr int kOctets = S::kColumns / 8;

  const Params& p;
  const Segment& work;
  uint8_t* const smem;
  const uint32_t base;
  const int warp, lane, slice,
      key0;             // of the products of queries and keys: slice of the elements, first key of a step
  const int row, four;  // of the softmax: row of the tile, first of the thread's four keys of a step
  uint32_t q[TILES][S::kProducts][4];
  float o[TILES][kOctets][4];
  float m, l;  // of the row: maximum in units of the raw scores; sum of the weights of the thread's keys

  __device__ __forceinline__ Attend(const Params& params, const Segment& of, uint8_t* memory)
      : p(params),
        work(of),
        smem(memory),
        base(smem_u32(memory)),
        warp(threadIdx.x >> 5),
        lane(threadIdx.x & 31),
        slice(warp & 3),
        key0((warp >> 2) * 16),
        row(threadIdx.x >> 3),
        four((threadIdx.x & 7) * 4),
        m(-INFINITY),
        l(0.f) {
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
      for (int n = 0; n < kOctets; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) o[i][n][c] = 0.f;
  }

  static __device__ __forceinline__ uint32_t chunk_at(int key, int chunk) {
    return key * S::kRow + (chunk ^ (key & 7)) * 16;
  }
  // Scores of key `key` of a step, a pair or four of them; of a row's first four keys the place of its factor too.
  __device__ __forceinline__ float* score_at(int of_slice, int of_row, int key) const {
    return reinterpret_cast<float*>(smem + S::kScores) + (of_slice * S::kRows + of_row) * S::kKeys +
           (key ^ (of_row & 3) * 8);
  }
  static __device__ __forceinline__ uint32_t weights_at(int of_row, int chunk) {
    return S::kWeights + of_row * (S::kKeys * 2) + (chunk ^ (of_row >> 1 & 3)) * 16;
  }

  // The lane as a number that is unknown at each call, so that addresses are computed again instead of kept in registers.
  __device__ __forceinline__ int this_lane() const {
    int own = lane;
    asm volatile("" : "+r"(own));
    return own;
  }

  // Page and slot of the key that this thread copies; page < 0 where there is none.
  __device__ __forceinline__ int2 place(int step) const {
    const int key = step * S::kKeys + row;
    if (step >= work.stop || key >= work.end) return make_int2(-1, 0);
    const int page = divided(key, p.page, p.by_page);
    return make_int2(p.table[work.seq * p.table_row + page], key - page * p.page);
  }

  // Copies an eighth of a key to a slot, with zeros where there is no key.
  __device__ __forceinline__ void copy(int2 at, int slot) const {
    const T* cache = static_cast<const T*>(p.cache);
    const int lane = this_lane();
    const T* from = at.x < 0 ? cache : cache + at.x * p.cache_block + at.y * p.cache_slot + (lane & 7) * 8;
    const uint32_t to = base + slot * S::kSlot + chunk_at(row, lane & 7);
#pragma unroll
    for (int c = 0; c < S::kRow / 128; ++c) cp_async_16_if(at.x >= 0, to + c * 128, from + c * 64);
    cp_async_commit();
  }

  __device__ __forceinline__ void load_queries() {
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int at = i * 16 + lane / 4 + r * 8, of = work.row0 + at,
                  query = divided(of, p.heads, p.by_heads);
        const T* from = static_cast<const T*>(p.q) + (work.token + query) * p.q_token +
                        (of - query * p.heads) * p.q_head + slice * 16 + (lane & 3) * 2;
#pragma unroll
        for (int j = 0; j < S::kProducts; ++j)
#pragma unroll
          for (int h = 0; h < 2; ++h)
            q[i][j][r + h * 2] =
                at < work.rows ? *reinterpret_cast<const uint32_t*>(from + j * (S::kSlices * 16) + h * 8)
                               : 0u;
      }
  }

  __device__ __forceinline__ void scores(uint32_t keys) const {
    const int lane = this_lane();
    // The chunks of a warp's products are 128 bytes apart: one address and constants.
    const uint32_t key = keys + chunk_at(key0 + (lane & 7) + (lane >> 4) * 8, slice * 2 + (lane >> 3 & 1));
    float s[TILES][2][4];
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) s[i][n][c] = 0.f;
#pragma unroll
    for (int j = 0; j < S::kProducts; ++j) {
      uint32_t b[4];
      ldmatrix_x4(b, key + j * 128);
#pragma unroll
      for (int i = 0; i < TILES; ++i) {
        Num<T>::mma(s[i][0], q[i][j], b[0], b[1]);
        Num<T>::mma(s[i][1], q[i][j], b[2], b[3]);
      }
    }
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int n = 0; n < 2; ++n)
          *reinterpret_cast<float2*>(
              score_at(slice, i * 16 + lane / 4 + r * 8, key0 + n * 8 + (lane & 3) * 2)) =
              make_float2(s[i][n][r * 2], s[i][n][r * 2 + 1]);
  }

  // Scores of a step -> weights and the row's factor. position: of the row's query. By the eight threads of each row.
  __device__ __forceinline__ void soften(int step, int position) {
    float s[4] = {};
#pragma unroll
    for (int i = 0; i < S::kSlices; ++i) {
      const float4 v = *reinterpret_cast<const float4*>(score_at(i, row, four));
      s[0] += v.x, s[1] += v.y, s[2] += v.z, s[3] += v.w;
    }
    float top = -INFINITY;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (step * S::kKeys + four + c > position) s[c] = -INFINITY;
      top = fmaxf(top, s[c]);
    }
#pragma unroll
    for (int by = 1; by < 8; by *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, by));
    const float before = m, now = fmaxf(top, before),
                by = now == -INFINITY ? 0.f : __fmul_rn(now, p.scale_log2);
    const float factor = top > before ? exp2_approx(__fmaf_rn(before, p.scale_log2, -by)) : 1.f;
    m = now;
    float sum = 0.f;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      s[c] = exp2_approx(__fmaf_rn(s[c], p.scale_log2, -by));
      sum += s[c];
    }
    l = __fmaf_rn(l, factor, sum);
    *reinterpret_cast<uint2*>(smem + weights_at(row, four / 8) + (four & 4) * 2) =
        make_uint2(packed<T>(s[0], s[1]), packed<T>(s[2], s[3]));
    if (four == 0) *score_at(0, row, 0) = factor;
  }

  __device__ __forceinline__ void add_values(uint32_t values) {
    const int lane = this_lane();
    float factor[TILES][2];
    bool grown = false;
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        factor[i][r] = *score_at(0, i * 16 + lane / 4 + r * 8, 0);
        grown = grown || factor[i][r] != 1.f;
      }
    if (__any_sync(0xffffffffu, grown)) {
#pragma unroll
      for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int n = 0; n < kOctets; ++n)
#pragma unroll
          for (int c = 0; c < 4; ++c) o[i][n][c] *= factor[i][c / 2];
    }
    // Chunk 2 j + h of a row from chunk h: rows of keys are whole 128 bytes, those of weights 64, so that the bits of j are changed.
    const uint32_t weight = base + weights_at(lane & 15, lane >> 4),
                   value = values + chunk_at(lane & 15, lane >> 4) + warp * (S::kColumns * 2);
#pragma unroll
    for (int j = 0; j < S::kKeys / 16; ++j) {
      uint32_t a[TILES][4];
#pragma unroll
      for (int i = 0; i < TILES; ++i) ldmatrix_x4(a[i], (weight ^ j * 32) + i * 16 * (S::kKeys * 2));
#pragma unroll
      for (int n = 0; n < kOctets; n += 2) {
        uint32_t b[4];
        ldmatrix_x4_trans(b, (value ^ n * 16) + j * 16 * S::kRow);
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
          Num<T>::mma(o[i][n], a[i], b[0], b[1]);
          Num<T>::mma(o[i][n + 1], a[i], b[2], b[3]);
        }
      }
    }
  }

  __device__ __forceinline__ void run() {
    const bool softens = threadIdx.x < S::kRows * 8;
    const int position = row < work.rows ? work.position + divided(work.row0 + row, p.heads, p.by_heads) : -1;
    int2 next = place(work.first);
    copy(next, 0);
    next = place(work.first + 1);
    load_queries();
    int slot = 0;
#pragma unroll 1
    for (int step = work.first; step < work.stop; ++step, slot ^= 1) {
      cp_async_wait<0>();
      __syncthreads();  // the step has landed for all, and all are done with the one before
      copy(next, slot ^ 1);
      next = place(step + 2);
      const uint32_t keys = base + slot * S::kSlot;
      scores(keys);
      __syncthreads();
      if (softens) soften(step, position);
      __syncthreads();
      add_values(keys);
    }
    cp_async_wait<0>();
    finish(softens);
  }

  // Writes the rows, or this part of them to the workspace.
  __device__ __forceinline__ void finish(bool softens) {
    float2* stats = reinterpret_cast<float2*>(smem + S::kScores);
    __syncthreads();  // factors have been read
    if (softens) {
#pragma unroll
      for (int by = 1; by < 8; by *= 2) l += __shfl_xor_sync(0xffffffffu, l, by);
      if (four == 0) stats[row] = make_float2(m, l);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int at = i * 16 + lane / 4 + r * 8;
        const bool exists = at < work.rows;
        const float2 stat = stats[at];
        if (work.own == nullptr) {
          const int of = work.row0 + at, query = divided(of, p.heads, p.by_heads),
                    head = of - query * p.heads;
          const int64_t token = work.token + query;
          const RowEpilogue epilogue(stat.x, stat.y, p.scale_log2);
          if (p.lse != nullptr && exists && threadIdx.x < 32 && (lane & 3) == 0)
            p.lse[token * p.heads + head] = epilogue.lse();
          store_row(static_cast<T*>(p.out) + token * p.out_token + head * p.out_head + warp * S::kColumns,
                    reinterpret_cast<const float (&)[kOctets * 4]>(o[i]), r, epilogue.inverse(), exists,
                    S::kColumns);
        } else if (exists) {
#pragma unroll
          for (int n = 0; n < kOctets; ++n)
            __stcg(reinterpret_cast<float2*>(work.own + at * S::kLatent + warp * S::kColumns + n * 8) +
                       (lane & 3),
                   make_float2(o[i][n][r * 2], o[i][n][r * 2 + 1]));
          if (threadIdx.x < 32 && (lane & 3) == 0)
            __stcg(reinterpret_cast<float2*>(work.own + S::kRows * S::kLatent) + at, stat);
        }
      }
  }
};

// The part in the workspace of a context whose first piece is `first`: a context's first piece uses the second of the CTA's two.
template <int TILES>
__device__ __forceinline__ float* part_at(const Params& p, int piece, int tile, int first) {
  return p.parts +
         (static_cast<int64_t>(piece * p.tiles + tile) * 2 + (piece == first)) * Shape<TILES>::kPart;
}

template <typename T, int TILES>
__device__ __forceinline__ void attend(const Params& p, uint8_t* smem) {
  using S = Shape<TILES>;
  Segment work;
  if (p.pieces == 0) {
    if (whole_segment<S::kRows>(p, work)) Attend<T, TILES>(p, work, smem).run();
    return;
  }
  const int piece = blockIdx.x / p.tiles, tile = blockIdx.x - piece * p.tiles, tid = threadIdx.x;
  int* shared = reinterpret_cast<int*>(smem + S::kScores);
  const int chunk = cdiv(p.seqs, S::kThreads);  // sequences of a thread
  int mine = 0;
  for (int i = tid * chunk; i < min((tid + 1) * chunk, p.seqs); ++i) mine += cost_of(p, sequence_at(p, i));
  const int2 sums = sums_before(mine, shared);
  const int each = max(cdiv(sums.y, p.pieces), p.least), begin = piece * each,
            stop = min(begin + each, sums.y);
  if (sums.x <= begin && begin < sums.x + mine) shared[16] = tid * chunk, shared[17] = sums.x;
  __syncthreads();
  Record record{0, 0, 0, 0};
  int seq = shared[16], start = shared[17];
  __syncthreads();  // scores will be where these are
  for (; begin < stop && start < stop; ++seq) {
    const Sequence s = sequence_at(p, seq);
    const int steps_at = start + p.sequence_cost, from = max(begin - steps_at, 0),
              count = min(stop - steps_at, s.steps) - from;
    work.seq = seq;
    if (count > 0 && set_rows<S::kRows>(p, work, s, tile)) {
      const int first = steps_at / each, parts = (steps_at + s.steps - 1) / each - first + 1;
      work.own = parts > 1 ? part_at<TILES>(p, piece, tile, first) : nullptr;
      work.first = from, work.stop = max(from, min(from + count, cdiv(work.end, S::kKeys)));
      if (parts > 1 && piece == first) record = {work.token, work.row0, work.rows, parts};
      Attend<T, TILES>(p, work, smem).run();
    }
    start += cost_of(p, s);
  }
  if (tid == 0) p.records[blockIdx.x] = record;
}

}  // namespace gm::mla80
#endif
