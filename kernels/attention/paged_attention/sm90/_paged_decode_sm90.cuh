// Paged attention for few rows of each sequence on Hopper: decode, and speculative verification.
//
// Keys are the M dimension of the products, and the query-head pairs of a KV head the N dimension, of 8, so that
// small groups waste little: S^T = K Q^T and O^T = V^T P^T by mma.sync.m16n8k16 (the transposed product of
// TensorRT-LLM's XQA; ETAP, arXiv:2506.01969). Each warp processes steps of 16 keys through a ring of its own, which
// cp.async fills ahead, and synchronizes with the other warps only at the end of a context.
//
// Scheduling is stream-K (LeanAttention, arXiv:2405.10480): the steps of all sequences, and a fixed cost for each,
// are cut into equal pieces, and a CTA processes one piece of one KV head, which it derives from the lengths. The KV
// heads of a piece, neighbours in memory, are read at the same time. Contexts that are cut leave partial results in
// the workspace; the CTA that arrives last reduces them in the order of the keys. So a launch needs no plan, its
// result does not depend on timing, and a captured graph stays right when lengths change.
#pragma once
#include <climits>

#include "attention/sm90/_attention_parts_sm90.cuh"
#include "_paged_decode_step_sm90.cuh"

#ifdef __CUDACC__
namespace gm {

// Element types of the caches: T, the dtype of q and out, or e4m3 codes.
template <typename T>
struct Floats {
  using Out = T;
  static constexpr int kBytes = 2;
};
struct Codes {
  using Out = RuntimeHalf;
  static constexpr int kBytes = 1;
};

// A part of the context of a KV head in the workspace, that of piece `piece`: [N, D] sums, then [N] maxima and sums of weights. A
// context's first piece uses the second of the CTA's two.
template <int D, int N>
__device__ __forceinline__ float* part_of(const DecodeParams& p, int piece, int first, int head) {
  constexpr int kPart = N * (D + 2);
  return p.parts + static_cast<int64_t>((piece * p.kv_heads + head) * 2 + (piece == first)) * kPart;
}

// Epilogue of a segment: reduces the sums of the warps, and writes the result to the output or, if other CTAs have
// parts of the context, to the workspace; the CTA that finishes last reduces all parts.
template <typename C, int D, int N, int WARPS>
__device__ __forceinline__ void finish(const DecodeParams& p, uint8_t* smem, DecodeSums<D, N>& sums,
                                       const Segment& segment, int start, int piece_steps, bool worked) {
  using S = DecodeShape<D, N, C::kBytes, WARPS>;
  using T = typename C::Out;
  constexpr bool kCodes = C::kBytes == 1;
  const int warp = threadIdx.x >> 5, g = threadIdx.x >> 2 & 7, t = threadIdx.x & 3;
  float by = 1.f;
  if constexpr (kCodes) {
    if (!p.by_token) by = p.v_scale[segment.head * p.v_scale_head];
  }
  float* o = reinterpret_cast<float*>(smem + S::kSums);
  float2* stats = reinterpret_cast<float2*>(smem + S::kStats);
  __shared__ bool last;
  __syncthreads();  // the rings have been read
#pragma unroll
  for (int n = 0; n < N / 8; ++n)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2)
        sums.l[n][r] += __shfl_xor_sync(0xffffffffu, sums.l[n][r], lanes);
      const int row = warp * N + n * 8 + t * 2 + r;
      if (g == 0) stats[row] = make_float2(sums.m[n][r], sums.l[n][r]);
      if (worked) {
#pragma unroll
        for (int i = 0; i < D / 8; ++i) {
          const float sum = sums.o[i / 2][n][r + i % 2 * 2];
          o[row * S::kPitch + (kCodes ? i / 2 * 16 + g * 2 + i % 2 : i * 8 + g)] = kCodes ? sum * by : sum;
        }
      }
    }
  __syncthreads();
  const int rows = min(segment.seq.queries * p.group, N);
  // First and last piece that have a part of the context.
  const int first = start / piece_steps, final = (start + segment.seq.steps - 1) / piece_steps;
  const bool whole = first == final;
  const auto part_at = [&](int piece) { return part_of<D, N>(p, piece, first, segment.head); };
  float* own = part_at((start + segment.from) / piece_steps);
#pragma unroll 1
  for (int i = threadIdx.x; i < rows * (D / 4); i += S::kThreads) {
    const int row = i / (D / 4), element = i % (D / 4) * 4;
    float2 stat[S::kWarps];
    RowPart sum{make_float4(0.f, 0.f, 0.f, 0.f), -INFINITY, 0.f};
#pragma unroll
    for (int w = 0; w < S::kWarps; ++w) {
      stat[w] = stats[w * N + row];
      if (stat[w].y != 0.f) sum.m = fmaxf(sum.m, stat[w].x);  // this warp saw keys
    }
    const float base = sum.m == -INFINITY ? 0.f : __fmul_rn(sum.m, p.scale_log2);
#pragma unroll
    for (int w = 0; w < S::kWarps; ++w) {
      if (stat[w].y == 0.f) continue;
      const float4 v = *reinterpret_cast<const float4*>(o + (w * N + row) * S::kPitch + element);
      const float by = exp2_approx(__fmaf_rn(stat[w].x, p.scale_log2, -base));
      sum.o.x = fmaf(by, v.x, sum.o.x), sum.o.y = fmaf(by, v.y, sum.o.y);
      sum.o.z = fmaf(by, v.z, sum.o.z), sum.o.w = fmaf(by, v.w, sum.o.w);
      sum.l = fmaf(by, stat[w].y, sum.l);
    }
    if (whole) {
      write_part<T>(p, segment.seq.token, segment.head, row, element, sum);
    } else {
      __stcg(reinterpret_cast<float4*>(own + row * D + element), sum.o);
      if (element == 0) __stcg(reinterpret_cast<float2*>(own + N * D) + row, make_float2(sum.m, sum.l));
    }
  }
  if (whole) return;
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned* counter = p.counters + first * p.kv_heads + segment.head;
    last = atomic_inc_acq_rel(counter) == static_cast<unsigned>(final - first);
    if (last) *counter = 0;
  }
  __syncthreads();
  if (!last) return;
  // A thread adds four elements of a row, or twice four where there are more rows, and has this many parts on their way at a time. More
  // would take registers from the loop over keys.
  constexpr int kSlots = N == 8 ? 12 : 8, kHalf = kSlots / 2;
  const int parts = final - first + 1, pieces = rows * (D / 4);
  const bool both = pieces > S::kThreads;
  const int ahead = both ? kHalf : kSlots;
#pragma unroll 1
  for (int i = threadIdx.x; i < pieces; i += both ? 2 * S::kThreads : S::kThreads) {
    RowPart sum, other;  // of the first four elements, and of the second
#pragma unroll 1
    for (int c = 0; c < parts; c += ahead) {
      RowPart read[kSlots];
      // Slots from kHalf on are of the second four elements, or of later parts of the first ones.
      const auto each = [&](auto work) {
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) {
          const bool second = both && slot >= kHalf;
          const int part = c + slot - (second ? kHalf : 0), at = i + (second ? S::kThreads : 0);
          if (part < parts && at < pieces) work(read[slot], part, at, second);
        }
      };
      each([&](RowPart& to, int part, int at, bool) {
        const int row = at / (D / 4);
        const float* from = part_at(first + part);
        to.o = __ldcg(reinterpret_cast<const float4*>(from + row * D + at % (D / 4) * 4));
        const float2 stat = __ldcg(reinterpret_cast<const float2*>(from + N * D) + row);
        to.m = stat.x, to.l = stat.y;
      });
      each([&](RowPart& mine, int part, int, bool second) {
        RowPart before = sum;
        if (second) before = other;
        if (part > 0) add_before(mine, before, p.scale_log2);
        if (second)
          other = mine;
        else
          sum = mine;
      });
    }
    const auto write = [&](int at, const RowPart& result) {
      write_part<T>(p, segment.seq.token, segment.head, at / (D / 4), at % (D / 4) * 4, result);
    };
    write(i, sum);
    if (both && i + S::kThreads < pieces) write(i + S::kThreads, other);
  }
}

template <typename C, int D, int N, bool CAP, int WARPS>
__device__ __forceinline__ void process_segment(const DecodeParams& p, const SoftCap<CAP>& cap, uint8_t* smem,
                                                const Segment& segment, int start, int piece_steps) {
  using S = DecodeShape<D, N, C::kBytes, WARPS>;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), g = threadIdx.x >> 2 & 7;
  const DecodeSequence& seq = segment.seq;
  const int* row = p.table + segment.index * p.table_row;
  const char* k = static_cast<const char*>(p.k) + segment.head * p.k_head;
  const char* v = static_cast<const char*>(p.v) + segment.head * p.v_head;
  const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
  const uint32_t ring = base + S::kRing + warp * (S::kStages * S::kStage);
  int step = seq.first + segment.from + warp;
  const int stop = seq.context > 0 ? seq.first + segment.from + segment.count : step;
  KeyLocations<S::kStep> locations[S::kStages];
  const auto copy = [&](int of, const KeyLocations<S::kStep>& from, uint32_t to) {
    copy_step<S>(p, seq, of, k, v, from, to);
    if constexpr (S::kScales > 0) {
      if (p.by_token) copy_scales<S>(p, seq, of, segment.head, from, to + 2 * S::kTile);
    }
  };
#pragma unroll
  for (int i = 0; i < S::kStages; ++i)
    locations[i] = locate_keys<S::kStep>(p, row, seq, step + i * S::kWarps, step + i * S::kWarps < stop);
  __syncthreads();  // the shared memory of the segment before has been read
#pragma unroll
  for (int i = 0; i < S::kStages; ++i) {
    if (step + i * S::kWarps < stop) copy(step + i * S::kWarps, locations[i], ring + i * S::kStage);
    if (i == 0) copy_queries<S, D, N>(p, base + S::kQ, segment);
    cp_async_commit();
  }
  int ahead = step + S::kStages * S::kWarps;  // the next step to copy
  KeyLocations<S::kStep> next = locate_keys<S::kStep>(p, row, seq, ahead, ahead < stop);
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
  cp_async_wait<S::kStages - 1>();
  __syncthreads();  // Q has landed
  CodeQueries<D> queries;
  if constexpr (C::kBytes == 1) queries.load(p, smem + S::kQ, segment.head);
  uint32_t tile = ring;
#pragma unroll 1
  for (; step < stop; step += S::kWarps) {
    const int key = step * S::kStep;
    const bool whole = key + S::kStep <= limit && (p.window <= 0 || key >= seq.context - p.window);
    cp_async_wait<S::kStages - 1>();
    __syncwarp();
    if constexpr (C::kBytes == 1)
      decode_step_codes<D>(sums, queries, tile,
                           reinterpret_cast<const float*>(smem + (tile - base) + 2 * S::kTile), p.by_token,
                           whole, key + g, limit, p.window, p.by_group, cap);
    else
      decode_step<typename C::Out, D, N>(sums, base + S::kQ, tile, p.scale_log2, whole, key + g, limit,
                                         p.window, p.by_group, cap);
    __syncwarp();
    if (ahead < stop) copy(ahead, next, tile);
    cp_async_commit();
    ahead += S::kWarps;
    next = locate_keys<S::kStep>(p, row, seq, ahead, ahead < stop);
    tile = tile + S::kStage == ring + S::kStages * S::kStage ? ring : tile + S::kStage;
  }
  cp_async_wait<0>();
  finish<C, D, N, WARPS>(p, smem, sums, segment, start, piece_steps, works);
}

// The steps of a sequence plus its fixed cost, without which a piece of many short contexts would take several
// times as long as one of a long context.
__device__ __forceinline__ int cost_of(const DecodeParams& p, const DecodeSequence& seq) {
  return seq.steps > 0 ? seq.steps + p.sequence_cost : 0;
}

// Fewest steps of a piece: twice as many parts of a context take half the time to read, but twice as long to reduce.
// Reducing a part takes as long as reading 3 KiB for each round of the CTA over its rows (measured: 1k to 16k keys, 4
// and 8 KV heads). steps: of all sequences. A multiple of the number of warps.
template <typename S, int D, int N>
__device__ __forceinline__ int least_piece(int steps, int seqs) {
  constexpr int kRounds = (N * (D / 4) + S::kThreads - 1) / S::kThreads;
  constexpr float kPartSteps = 3072.f * kRounds / (2 * S::kTile);
  const int least = static_cast<int>(sqrtf(kPartSteps * steps / seqs)) + 1;
  return (least + S::kWarps - 1) / S::kWarps * S::kWarps;
}

// Steps of the sequences of the threads before this one, and of all sequences; the fewest and the most that one has.
struct StepSums {
  int before, all, fewest, most;
};

// Prefix sum over the CTA. mine, fewest, most: of this thread's sequences. totals: shared memory, three per warp. By all threads.
__device__ __forceinline__ StepSums sum_steps(int mine, int fewest, int most, int* totals, int warps) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int sum = mine;
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, sum, lanes);
    if (lane >= lanes) sum += other;
  }
  fewest = __reduce_min_sync(0xffffffffu, fewest), most = __reduce_max_sync(0xffffffffu, most);
  if (lane == 31) totals[warp * 3] = sum, totals[warp * 3 + 1] = fewest, totals[warp * 3 + 2] = most;
  __syncthreads();
  StepSums sums{sum - mine, 0, fewest, most};
  for (int w = 0; w < warps; ++w) {
    if (w < warp) sums.before += totals[w * 3];
    sums.all += totals[w * 3];
    sums.fewest = min(sums.fewest, totals[w * 3 + 1]), sums.most = max(sums.most, totals[w * 3 + 2]);
  }
  return sums;
}

template <typename C, int D, int N, bool CAP, int WARPS = 4>
__device__ __forceinline__ void paged_decode(const DecodeParams& p, const SoftCap<CAP>& cap) {
  using S = DecodeShape<D, N, C::kBytes, WARPS>;
  extern __shared__ __align__(128) uint8_t smem[];
  __shared__ int totals[S::kWarps * 3], found[2];
  const int tid = threadIdx.x, piece = blockIdx.x / p.kv_heads;
  Segment segment;
  segment.head = blockIdx.x - piece * p.kv_heads;
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const int chunk = (p.seqs + S::kThreads - 1) / S::kThreads;  // sequences of a thread
  int mine = 0, fewest = INT_MAX, most = 0;
  for (int i = tid * chunk; i < min((tid + 1) * chunk, p.seqs); ++i) {
    const DecodeSequence seq = decode_sequence<S::kStep>(p, i);
    mine += cost_of(p, seq), fewest = min(fewest, seq.steps), most = max(most, seq.steps);
  }
  const StepSums sums = sum_steps(mine, fewest, most, totals, S::kWarps);
  const int least = least_piece<S, D, N>(sums.all, p.seqs);
  int piece_steps = max((sums.all + p.pieces - 1) / p.pieces, least);
  // Of contexts that are about equal none begins within a piece: each has p.even pieces, or each piece so many contexts. span: steps of
  // a context then, whose beginning costs nothing.
  int span = 0;
  if (p.even > 0 && sums.fewest * 16 >= sums.most * 15) {
    const int parts = p.seqs <= p.pieces ? p.even : 1, of_part = (sums.most + parts - 1) / parts;
    if (of_part >= max(least, kLeastEven)) {
      const int whole = (of_part + S::kWarps - 1) / S::kWarps * S::kWarps;
      span = whole * parts, piece_steps = p.seqs <= p.pieces ? whole : span * p.even;
    }
  }
  const int begin = piece * piece_steps,
            stop = span > 0 ? begin + piece_steps : min(begin + piece_steps, sums.all);
  if (begin >= (span > 0 ? span * p.seqs : sums.all)) return;
  int start;
  if (span > 0) {
    segment.index = begin / span, start = segment.index * span;
  } else {
    if (sums.before <= begin && begin < sums.before + mine) found[0] = tid * chunk, found[1] = sums.before;
    __syncthreads();
    segment.index = found[0], start = found[1];
  }
  const int lead = span > 0 ? 0 : p.sequence_cost;
  for (; start < stop && p.seqs > segment.index; ++segment.index) {  // of the sequence
    segment.seq = decode_sequence<S::kStep>(p, segment.index);
    const int steps_at = start + lead;
    segment.from = max(begin - steps_at, 0);
    segment.count = min(stop - steps_at, segment.seq.steps) - segment.from;
    if (segment.count > 0) process_segment<C, D, N, CAP, WARPS>(p, cap, smem, segment, steps_at, piece_steps);
    start += span > 0 ? span : cost_of(p, segment.seq);
  }
}

}  // namespace gm
#endif
