// Causal attention over dense sequences for Hopper,
// keys and values of different widths: un-absorbed MLA prefill.
//
// FlashAttention-3's form (Shah et al., 2024), as in _paged_attention_sm90.cuh: two warpgroups multiply 64
// queries each while a warp copies; the scores of a tile of keys are computed while the values of the tile
// before are multiplied, and the two warpgroups take turns. Work is found on the device without counters and
// without memory of its own:
//  - the first and the last tile of queries of a sequence see as many keys together as the second and the
//    last but one, and so on. Such pairs are the pieces of work: those of a sequence take the same time, and
//    sequences sorted by it give sorted pieces, which are dealt to the CTAs back and forth;
//  - the pieces of a head are neighbours, so that the CTAs share its keys and values in the L2 cache;
//  - a batch with less than a pair for each CTA is dealt by single tiles.
#pragma once
#include <cstdint>

#include "sm90/tma.cuh"
#include "sm90/wgmma.cuh"

namespace gm {

constexpr int kSortedSequences = 512;  // up to which sequences are sorted; more are taken as they come

struct VarlenParams {
  void* out;
  float* lse;  // [tokens, heads] or null
  const int* query_start;
  const int* context_start;
  int64_t out_token, out_head;  // strides, in elements
  int seqs, heads, group, v_dim;
  float scale_log2;
};

// DK, DV: elements of a key and of a value, padded to whole multiples of 64 in shared memory.
template <int DK, int DV>
struct VarlenShape {
  static constexpr int kRows = 128, kKeys = 128, kStages = 2, kThreads = 384;
  static constexpr int kQ = kRows * DK * 2, kKeyTile = kKeys * DK * 2, kValueTile = kKeys * DV * 2;
  static constexpr int kK = kQ, kV = kK + kStages * kKeyTile;
  static constexpr int kOrder = kV + kStages * kValueTile;  // sequences in the order of work
  static constexpr int kWeights = kOrder + kSortedSequences * 16;
  static constexpr int kPiece = kWeights + kSortedSequences * 4;
  static constexpr int kShare = kPiece + 32;
  static constexpr int kBars = kShare + 16;
  static constexpr int kBytes = kBars + (2 + 4 * kStages) * 8;
};

}  // namespace gm

#ifdef __CUDACC__
namespace gm {

enum : int { kVarlenTurn = 1, kVarlenGroup = 3 };  // named barriers, the first of a pair each

template <typename S>
struct VarlenBars {
  uint32_t base;
  __device__ __forceinline__ uint32_t q_full() const { return base; }
  __device__ __forceinline__ uint32_t q_empty() const { return base + 8; }
  __device__ __forceinline__ uint32_t k_full(int tile) const { return base + 16 + tile % S::kStages * 8; }
  __device__ __forceinline__ uint32_t k_empty(int tile) const { return k_full(tile) + S::kStages * 8; }
  __device__ __forceinline__ uint32_t v_full(int tile) const { return k_full(tile) + S::kStages * 16; }
  __device__ __forceinline__ uint32_t v_empty(int tile) const { return k_full(tile) + S::kStages * 24; }
  __device__ __forceinline__ static uint32_t parity(int tile) { return tile / S::kStages & 1; }
};

// Up to 128 queries of a head: the first one in q, how many (0 at the end of all work), its position; the
// first row of the sequence in k and v, and how many rows are seen.
struct VarlenPiece {
  int token, rows, position, key, end, head;
};

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// token, queries, key, context.
__device__ __forceinline__ int4 varlen_sequence(const VarlenParams& p, int i) {
  const int token = p.query_start[i], key = p.context_start[i];
  return make_int4(token, max(0, p.query_start[i + 1] - token), key, max(0, p.context_start[i + 1] - key));
}

// Sorts the sequences by the keys that a pair of tiles sees, the most first, and says whether the work is
// dealt in pairs of tiles. By all threads.
template <typename S>
__device__ __forceinline__ void sort_varlen(const VarlenParams& p, uint8_t* smem) {
  int4* const order = reinterpret_cast<int4*>(smem + S::kOrder);
  int* const weights = reinterpret_cast<int*>(smem + S::kWeights);
  int* const share = reinterpret_cast<int*>(smem + S::kShare);
  if (threadIdx.x < 2) share[threadIdx.x] = 0;
  __syncthreads();
  if (p.seqs > kSortedSequences) return;
#pragma unroll 1
  for (int i = threadIdx.x; i < p.seqs; i += S::kThreads) {
    const int4 seq = varlen_sequence(p, i);
    weights[i] = seq.y > 0 ? ceil_div(seq.w, S::kKeys) + ceil_div(max(0, seq.w - seq.y), S::kKeys) : -1;
    if (seq.y > 0) {
      atomicAdd(share, ceil_div(ceil_div(seq.y, S::kRows), 2));
      atomicAdd(share + 1, 1);
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < p.seqs; i += S::kThreads) {
    const int weight = weights[i];
    int rank = 0;
    for (int o = 0; o < p.seqs; ++o) rank += weights[o] > weight || (weights[o] == weight && o < i);
    order[rank] = varlen_sequence(p, i);
  }
  __syncthreads();
}

// The pieces of work of this CTA, one after the other. By a whole warp.
template <typename S>
struct VarlenPieces {
  int round = 0, rank = 0, base = 0;  // sequences before `rank` have `base` pieces, or pairs of them
  int4 seq{};
  int head = 0, then = -1;  // the second tile of a pair, < 0 if there is none
  bool paired;

  __device__ __forceinline__ VarlenPieces(const VarlenParams& p, const uint8_t* smem) {
    const int* share = reinterpret_cast<const int*>(smem + S::kShare);
    const int64_t pairs = int64_t(share[0]) * p.heads, ctas = gridDim.x;
    paired = p.seqs > kSortedSequences || (pairs >= ctas && (share[1] > 1 || pairs >= 3 * ctas));
  }

  __device__ __forceinline__ VarlenPiece piece(int tile) const {
    const int begin = tile * S::kRows, rows = min(S::kRows, seq.y - begin);
    const int position = seq.w - seq.y + begin;
    return {seq.x + begin, rows, position, seq.z, max(0, position + rows), head};
  }

  __device__ __forceinline__ VarlenPiece next(const VarlenParams& p, const uint8_t* smem) {
    if (then >= 0) {
      const int tile = then;
      then = -1;
      return piece(tile);
    }
    const int4* order = reinterpret_cast<const int4*>(smem + S::kOrder);
    const int lane = threadIdx.x & 31, ctas = gridDim.x, cta = blockIdx.x;
    const int item = round * ctas + (round & 1 ? ctas - 1 - cta : cta);
    ++round;
    while (rank < p.seqs) {
      const int at = rank + lane;
      int4 mine = make_int4(0, 0, 0, 0);
      if (at < p.seqs) mine = p.seqs > kSortedSequences ? varlen_sequence(p, at) : order[at];
      const int tiles = ceil_div(mine.y, S::kRows), pieces = (paired ? (tiles + 1) / 2 : tiles) * p.heads;
      int sum = pieces;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += other;
      }
      const unsigned past = __ballot_sync(0xffffffffu, item < base + sum);
      if (past == 0) {
        base += __shfl_sync(0xffffffffu, sum, 31), rank += 32;
        continue;
      }
      const int from = __ffs(past) - 1;
      base += __shfl_sync(0xffffffffu, sum - pieces, from), rank += from;
      seq.x = __shfl_sync(0xffffffffu, mine.x, from), seq.y = __shfl_sync(0xffffffffu, mine.y, from);
      seq.z = __shfl_sync(0xffffffffu, mine.z, from), seq.w = __shfl_sync(0xffffffffu, mine.w, from);
      const int last = ceil_div(seq.y, S::kRows) - 1, within = item - base;
      if (paired) {
        const int of_head = last / 2 + 1;
        head = within / of_head;
        const int early = within - head * of_head;
        then = 2 * early < last ? early : -1;
        return piece(last - early);
      }
      // Heads side by side take the longest tiles first; tiles side by side share keys and values, which
      // counts where contexts are long.
      if (seq.w >= 2 * seq.y) {
        head = within / (last + 1);
        return piece(last - (within - head * (last + 1)));
      }
      const int early = within / p.heads;
      head = within - early * p.heads;
      return piece(last - early);
    }
    return {0, 0, 0, 0, 0, 0};
  }
};

// Copies the tiles of all pieces of work. By one warp.
template <typename S, int DK, int DV>
__device__ __forceinline__ void copy_varlen(const VarlenParams& p, const CUtensorMap& q_map,
                                            const CUtensorMap& k_map, const CUtensorMap& v_map, uint8_t* smem,
                                            uint32_t base) {
  const VarlenBars<S> bars{base + S::kBars};
  VarlenPieces<S> pieces(p, smem);
  int tile = 0;
#pragma unroll 1
  for (uint32_t q_parity = 1;; q_parity ^= 1) {
    const VarlenPiece piece = pieces.next(p, smem);
    const int count = ceil_div(piece.end, S::kKeys), kv_head = piece.head / p.group;
    if ((threadIdx.x & 31) == 0) {
#pragma unroll 1
      for (int i = 0; i <= count; ++i) {
        if (i < count) {
          const int t = tile + i, key = piece.key + (count - 1 - i) * S::kKeys;
          mbar_wait(bars.k_empty(t), bars.parity(t) ^ 1);
          mbar_arrive_expect_tx(bars.k_full(t), S::kKeyTile);
#pragma unroll
          for (int h = 0; h < DK / 64; ++h)
            tma_load(base + S::kK + t % S::kStages * S::kKeyTile + h * (S::kKeys * 128), &k_map, h * 64,
                     kv_head, key, bars.k_full(t));
        }
        if (i == 0) {
          mbar_wait(bars.q_empty(), q_parity);
          int4* const to = reinterpret_cast<int4*>(smem + S::kPiece);
          to[0] = make_int4(piece.token, piece.rows, piece.position, piece.key);
          to[1] = make_int4(piece.end, piece.head, 0, 0);
          if (piece.rows == 0) {
            mbar_arrive(bars.q_full());
          } else {
            mbar_arrive_expect_tx(bars.q_full(), S::kQ);
#pragma unroll
            for (int h = 0; h < DK / 64; ++h)
              tma_load(base + h * (S::kRows * 128), &q_map, h * 64, piece.head, piece.token, bars.q_full());
          }
        } else {
          const int t = tile + i - 1, key = piece.key + (count - i) * S::kKeys;
          mbar_wait(bars.v_empty(t), bars.parity(t) ^ 1);
          mbar_arrive_expect_tx(bars.v_full(t), S::kValueTile);
#pragma unroll
          for (int h = 0; h < DV / 64; ++h)
            tma_load(base + S::kV + t % S::kStages * S::kValueTile + h * (S::kKeys * 128), &v_map, h * 64,
                     kv_head, key, bars.v_full(t));
        }
      }
    }
    __syncwarp();
    tile += count;
    if (piece.rows == 0) break;
  }
}

// What a thread keeps of two of its warp's 16 rows: lane / 4 and lane / 4 + 8. o: sums of values; m: the
// largest raw score; l: this thread's part of the sum of weights.
template <int DV>
struct VarlenRows {
  float o[DV / 2], m[2], l[2];
};

// Scores -> weights 2^(scale_log2 (s - m)), in place; factor: what the sums so far are multiplied by.
template <int DV>
__device__ __forceinline__ void weigh_varlen(float (&s)[64], VarlenRows<DV>& rows, float (&factor)[2],
                                             float scale_log2) {
  float most[2] = {-INFINITY, -INFINITY}, base[2], sum[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < 64; ++i) most[i >> 1 & 1] = fmaxf(most[i >> 1 & 1], s[i]);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    most[r] = fmaxf(most[r], __shfl_xor_sync(0xffffffffu, most[r], 1));
    most[r] = fmaxf(most[r], __shfl_xor_sync(0xffffffffu, most[r], 2));
    const float m = fmaxf(most[r], rows.m[r]);
    base[r] = m == -INFINITY ? 0.f : __fmul_rn(m, scale_log2);
    factor[r] = most[r] > rows.m[r] ? exp2_approx(__fmul_rn(rows.m[r], scale_log2) - base[r]) : 1.f;
    rows.m[r] = m;
  }
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    s[i] = exp2_approx(fmaf(s[i], scale_log2, -base[i >> 1 & 1]));
    sum[i >> 1 & 1] += s[i];
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) rows.l[r] = fmaf(rows.l[r], factor[r], sum[r]);
}

// Divides the rows by their sums and writes them, and their log-sum-exp. row0: of this thread, in the piece.
template <typename T, int DV>
__device__ __forceinline__ void write_varlen(const VarlenParams& p, const VarlenPiece& piece,
                                             const VarlenRows<DV>& rows, int row0) {
  constexpr float kLn2 = 0.6931471805599453f;
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = row0 + r * 8;
    const int64_t token = piece.token + row;
    const float by = rows.l[r] > 0.f ? 1.f / rows.l[r] : 0.f;
    const bool real = row < piece.rows;
    if (real && p.lse != nullptr && (lane & 3) == 0)
      p.lse[token * p.heads + piece.head] =
          rows.l[r] > 0.f ? (rows.m[r] * p.scale_log2 + __log2f(rows.l[r])) * kLn2 : -INFINITY;
    T* const to = static_cast<T*>(p.out) + token * p.out_token + piece.head * p.out_head;
#pragma unroll
    for (int b = 0; b < DV / 32; ++b) {
      uint32_t w[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = (b * 4 + j) * 4 + r * 2;
        w[j] = packed<T>(rows.o[i] * by, rows.o[i + 1] * by);
      }
      transpose_quad(w, lane);
      const int column = (b * 4 + (lane & 3)) * 8;
      if (real && column < p.v_dim)
        *reinterpret_cast<uint4*>(to + column) = make_uint4(w[0], w[1], w[2], w[3]);
    }
  }
}

// A multiplying warpgroup, 0 or 1.
template <typename T, int DK, int DV>
__device__ __forceinline__ void multiply_varlen(const VarlenParams& p, uint8_t* smem, uint32_t base,
                                                int group) {
  using S = VarlenShape<DK, DV>;
  const VarlenBars<S> bars{base + S::kBars};
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3, tid = threadIdx.x & 127;
  const auto free_slot = [&](uint32_t bar) {
    if (lane < kArrivingLanes) mbar_arrive(bar);
  };
  const auto turn = [&] { bar_sync(kVarlenTurn + group, 256); };
  const auto pass = [&] { bar_arrive(kVarlenTurn + (group ^ 1), 256); };
  const int mine = group * 64 + warp * 16 + (lane >> 2);
  const uint64_t q = swizzle128_descriptor(warp_uniform(base + group * 64 * 128));
  if (group == 1) bar_arrive(kVarlenTurn, 256);  // the first one begins
  int tile = 0;
#pragma unroll 1
  for (uint32_t q_parity = 0;; q_parity ^= 1) {
    mbar_wait(bars.q_full(), q_parity);
    const int4 a = reinterpret_cast<const int4*>(smem + S::kPiece)[0];
    const int2 b = reinterpret_cast<const int2*>(smem + S::kPiece)[2];
    const VarlenPiece piece{a.x, a.y, a.z, a.w, b.x, b.y};
    if (piece.rows == 0) break;
    const int count = ceil_div(piece.end, S::kKeys);
    const int whole = max(0, piece.position + group * 64 + 1) / S::kKeys;  // tiles that every row sees whole
    int limit[2];  // of the keys that the thread's rows see, less its first column
#pragma unroll
    for (int r = 0; r < 2; ++r) limit[r] = min(piece.position + mine + r * 8 + 1, piece.end) - (lane & 3) * 2;

    VarlenRows<DV> rows;
    rows.m[0] = rows.m[1] = -INFINITY, rows.l[0] = rows.l[1] = 0.f;
    float s[64], factor[2];
    uint32_t weights[8][4];
    const auto start_scores = [&](int i) {
      const uint64_t k =
          swizzle128_descriptor(warp_uniform(base + S::kK + (tile + i) % S::kStages * S::kKeyTile));
#pragma unroll
      for (int j = 0; j < DK / 16; ++j)
        Wgmma<T, S::kKeys>::ss(s, q + (j >> 2) * (S::kRows * 128 >> 4) + (j & 3) * 2,
                               k + (j >> 2) * (S::kKeys * 128 >> 4) + (j & 3) * 2, j > 0);
      wgmma_commit();
    };
    const auto start_values = [&](int i, int add) {
      const uint64_t v = swizzle128_descriptor(
          warp_uniform(base + S::kV + (tile + i) % S::kStages * S::kValueTile), 1024, S::kKeys * 128);
#pragma unroll
      for (int j = 0; j < S::kKeys / 16; ++j)
        Wgmma<T, DV>::template rs<kMajorMN>(rows.o, weights[j], v + j * (2048 >> 4), j > 0 ? 1 : add);
      wgmma_commit();
    };
    const auto weigh = [&](int i) {
      const int n = count - 1 - i;
      if (n >= whole) {
#pragma unroll
        for (int j = 0; j < 64; ++j)
          s[j] = n * S::kKeys + (j >> 2) * 8 + (j & 1) < limit[j >> 1 & 1] ? s[j] : -INFINITY;
      }
      weigh_varlen<DV>(s, rows, factor, p.scale_log2);
    };
    const auto round_weights = [&] {
#pragma unroll
      for (int j = 0; j < 32; ++j) weights[j >> 2][j & 3] = packed<T>(s[2 * j], s[2 * j + 1]);
    };
    const auto wait_keys = [&](int i) { mbar_wait(bars.k_full(tile + i), bars.parity(tile + i)); };
    const auto wait_values = [&](int i) {
      mbar_wait(bars.v_full(tile + i), bars.parity(tile + i));
      const int from = piece.end % S::kKeys;
      if (i == 0 && from != 0) {
        // What follows the last key that is seen may be anything, and 0 times that would not be 0.
        const uint32_t slot = base + S::kV + tile % S::kStages * S::kValueTile;
        for (int c = tid + from * (DV / 8); c < S::kKeys * (DV / 8); c += 128) {
          const int row = c / (DV / 8), chunk = c % (DV / 8);
          st_shared(slot + (chunk >> 3) * (S::kKeys * 128) + row * 128 + (chunk & 7) * 16,
                    make_uint4(0, 0, 0, 0));
        }
        fence_proxy_async();
        bar_sync(kVarlenGroup + group, 128);
      }
    };

    if (count > 0) {
      wait_keys(0);
      turn();
      wgmma_fence();
      start_scores(0);
      pass();
      wgmma_wait<0>();
      wgmma_fence_operand(s);
      free_slot(bars.k_empty(tile));
      weigh(0);
      round_weights();
      int add = 0;
#pragma unroll 1
      for (int i = 1; i < count; ++i) {
        wait_keys(i);
        turn();
        wgmma_fence();
        start_scores(i);
        wait_values(i - 1);
        wgmma_fence_operand(rows.o);
        wgmma_fence();
        start_values(i - 1, add);
        pass();
        wgmma_wait<1>();
        wgmma_fence_operand(s);
        free_slot(bars.k_empty(tile + i));
        weigh(i);
        wgmma_fence_operand(s);
        // Never true: ptxas, which would put the wait before the exponentials,
        // moves it across no such branch.
        if (rows.l[0] + rows.l[1] < 0.f) mbar_arrive(bars.q_full());
        wgmma_wait<0>();
        wgmma_fence_operand(rows.o);
        free_slot(bars.v_empty(tile + i - 1));
        if (__any_sync(0xffffffffu, factor[0] != 1.f || factor[1] != 1.f)) {
#pragma unroll
          for (int j = 0; j < DV / 2; ++j) rows.o[j] *= factor[j >> 1 & 1];
        }
        round_weights();
        add = 1;
      }
      free_slot(bars.q_empty());
      wait_values(count - 1);
      turn();
      wgmma_fence();
      start_values(count - 1, add);
      pass();
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        rows.l[r] += __shfl_xor_sync(0xffffffffu, rows.l[r], 1);
        rows.l[r] += __shfl_xor_sync(0xffffffffu, rows.l[r], 2);
      }
      wgmma_wait<0>();
      wgmma_fence_operand(rows.o);
      free_slot(bars.v_empty(tile + count - 1));
    } else {
      free_slot(bars.q_empty());
#pragma unroll
      for (int j = 0; j < DV / 2; ++j) rows.o[j] = 0.f;
    }
    tile += count;
    write_varlen<T, DV>(p, piece, rows, mine);
  }
}

template <typename T, int DK, int DV>
__device__ __forceinline__ void varlen_attention(const VarlenParams& p, const CUtensorMap& q_map,
                                                 const CUtensorMap& k_map, const CUtensorMap& v_map) {
  using S = VarlenShape<DK, DV>;
  extern __shared__ __align__(1024) uint8_t smem[];
  const uint32_t base = smem_u32_once(smem);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
  if (threadIdx.x == 0) {
    const VarlenBars<S> bars{base + S::kBars};
    mbar_init(bars.q_full(), 1), mbar_init(bars.q_empty(), 8 * kArrivingLanes);
    for (int i = 0; i < S::kStages; ++i) {
      mbar_init(bars.k_full(i), 1), mbar_init(bars.v_full(i), 1);
      mbar_init(bars.k_empty(i), 8 * kArrivingLanes), mbar_init(bars.v_empty(i), 8 * kArrivingLanes);
    }
    fence_mbarrier_init();
  }
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  sort_varlen<S>(p, smem);  // begins with a barrier of all threads
  if (warp >= 8) {
    setmaxnreg_dec<40>();
    if (warp == 8) copy_varlen<S, DK, DV>(p, q_map, k_map, v_map, smem, base);
  } else {
    setmaxnreg_inc<232>();
    multiply_varlen<T, DK, DV>(p, smem, base, warp >> 2);
  }
}

}  // namespace gm
#endif
