// Causal attention over a paged cache for Hopper: prefill, chunks and decodes of one batch in one launch.
//
// FlashAttention-3's form (Shah et al., 2024): two warpgroups multiply 64 rows each while a third one copies;
// the scores of a tile of keys are computed while the values of the tile before are multiplied, and the two
// warpgroups take turns, so that one multiplies while the other takes exponentials. Beyond it:
//  - rows are (query, head of the KV group) pairs, and a page is a box of the tensor copy engine (pages of a
//    multiple of 8 tokens; others are copied by cp.async);
//  - nothing is planned on the host: a CTA finds its work from query_start and seq_lens, in an order that all
//    CTAs agree on, and takes the next piece by a counter. Long and short pieces have a counter each, so that
//    a mix of prefill, which multiplies, and decode, which reads, runs side by side;
//  - where a sequence has at most 64 rows, the two warpgroups share its keys and add their results;
//  - sums are multiplied by exactly 1 where a row's maximum stays, and not at all where those of a warp do;
//    tiles of keys lie at multiples of their size. So a row's result does not depend on what else is in the
//    batch; without parts and shared keys, nor on how many queries of its own sequence are in it.
#pragma once
#include "attention/sm90/_attention_codes_sm90.cuh"
#include "attention/sm90/_attention_copy_sm90.cuh"
#include "attention/sm90/_attention_rows_sm90.cuh"
#include "attention/sm90/_soft_cap_sm90.cuh"
#include "sm90/wgmma.cuh"

#ifdef __CUDACC__
namespace gm {

// Tile of scores -> weights 2^(scale_log2 (s - m)), in place; factor: what the sums so far are multiplied by.
// scale_log2: by row.
struct SameScale {
  float value;
  __device__ __forceinline__ float operator[](int) const { return value; }
};
template <int D, typename Scale>
__device__ __forceinline__ void softmax(float (&s)[64], Rows<D>& rows, float (&factor)[2],
                                        const Scale& scale_log2) {
  float most[2] = {-INFINITY, -INFINITY};
#pragma unroll
  for (int i = 0; i < 64; ++i) most[i >> 1 & 1] = fmaxf(most[i >> 1 & 1], s[i]);
  float base[2], sum[2] = {0.f, 0.f};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    most[r] = fmaxf(most[r], __shfl_xor_sync(0xffffffffu, most[r], 1));
    most[r] = fmaxf(most[r], __shfl_xor_sync(0xffffffffu, most[r], 2));
    const float m = fmaxf(most[r], rows.m[r]);
    base[r] = m == -INFINITY ? 0.f : __fmul_rn(m, scale_log2[r]);
    factor[r] = most[r] > rows.m[r] ? exp2_approx(__fmul_rn(rows.m[r], scale_log2[r]) - base[r]) : 1.f;
    rows.m[r] = m;
  }
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    s[i] = exp2_approx(fmaf(s[i], scale_log2[i >> 1 & 1], -base[i >> 1 & 1]));
    sum[i >> 1 & 1] += s[i];
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) rows.l[r] = fmaf(rows.l[r], factor[r], sum[r]);
}

// Scores of keys that a row does not see become -inf.
// ends, begins: by row, counted from this thread's first key.
__device__ __forceinline__ void hide(float (&s)[64], const int (&begins)[2], const int (&ends)[2]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const int key = (i >> 2) * 8 + (i & 1), r = i >> 1 & 1;
    s[i] = key >= begins[r] && key < ends[r] ? s[i] : -INFINITY;
  }
}

template <typename T>
__device__ __forceinline__ void round_weights(const float (&s)[64], uint32_t (&weights)[8][4]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) weights[i >> 2][i & 3] = packed<T>(s[2 * i], s[2 * i + 1]);
}

// Of a warpgroup: scores of 64 rows and a tile of keys.
template <typename T, int D>
__device__ __forceinline__ void start_scores(float (&s)[64], uint64_t q, uint64_t k) {
  using S = AttentionShape<D>;
#pragma unroll
  for (int i = 0; i < D / 16; ++i)
    Wgmma<T, S::kKeys>::ss(s, q + (i >> 2) * (S::kRows * 128 >> 4) + (i & 3) * 2,
                           k + (i >> 2) * (S::kKeys * 128 >> 4) + (i & 3) * 2, i > 0);
  wgmma_commit();
}

template <typename T, int D>
__device__ __forceinline__ void start_values(float (&o)[D / 2], const uint32_t (&weights)[8][4], uint64_t v,
                                             int add) {
#pragma unroll
  for (int i = 0; i < AttentionShape<D>::kKeys / 16; ++i)
    Wgmma<T, D>::template rs<kMajorMN>(o, weights[i], v + i * (2048 >> 4), i > 0 ? 1 : add);
  wgmma_commit();
}

// A multiplying warpgroup, 0 or 1. T: of the products. CAP: scores have a soft cap.
template <typename T, int D, Copies COPIES, bool CAP>
__device__ __forceinline__ void multiply(const AttentionParams& p, const SoftCap<CAP>& cap, uint8_t* smem,
                                         uint32_t base, int group) {
  using S = AttentionShape<D>;
  using Out = std::conditional_t<COPIES == kCodeCopies, EitherHalf, T>;
  constexpr bool BOXES = COPIES == kBoxCopies, CODES = COPIES == kCodeCopies;
  const Bars<D> bars{base + S::kBars};
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3, tid = threadIdx.x & 127;
  const auto free_slot = [&](uint32_t bar) {
    if (lane < kArrivingLanes) mbar_arrive(bar);
  };
  if (group == 1) bar_arrive(kBarTurn, 256);  // the first one begins
  int tile = 0;
#pragma unroll 1
  for (uint32_t q_parity = 0;; q_parity ^= 1) {
    mbar_wait(bars.q_full(), q_parity);
    const Work work = get_work(smem + S::kWork);
    if (work.rows == 0) break;
    // The warpgroups take turns at tiles of keys, over the same rows.
    const bool shared = work.rows <= p.shared_rows;
    const int row0 = shared ? 0 : group * 64, step = shared ? 2 : 1;
    const uint64_t q = swizzle128_descriptor(warp_uniform(base + row0 * 128));
    const int mine = row0 + warp * 16 + (lane >> 2), none = 1 << 30;
    // Scale of the scores, or of the capped ones.
    std::conditional_t<CODES, float[2], SameScale> scale_log2;
    float cap_by[2] = {cap.in, cap.in};
    if constexpr (CODES) {
      if (!shared || group == 0)
        convert_queries<D>(p, smem, row0, p.by_token ? 1.f : p.k_scale[work.head * p.k_scale_head]);
      if (shared)
        bar_sync(kBarBoth, 256);
      else
        bar_sync(kBarGroup + group, 128);
      const float* const scales = reinterpret_cast<const float*>(smem + S::kRowScales) + mine;
      scale_log2[0] = p.by_token ? 1.f : scales[0], scale_log2[1] = p.by_token ? 1.f : scales[8];
      if constexpr (CAP) {
        cap_by[0] *= scale_log2[0], cap_by[1] *= scale_log2[1];
        scale_log2[0] = scale_log2[1] = 1.f;
      }
    } else {
      scale_log2.value = p.scale_log2;
    }
    int limit[2];  // of the keys that the thread's rows see, less its first column
#pragma unroll
    for (int r = 0; r < 2; ++r)
      limit[r] = min(work.position + static_cast<int>((mine + r * 8) * p.by_group >> 16) + 1, work.end) -
                 (lane & 3) * 2;
    const int reach = p.window > 0 ? p.window : none;
    // Tiles seen_from .. seen_to are seen whole by every row.
    const int seen_to = (max(0, work.position) + 1) / S::kKeys,
              seen_from = p.window > 0 ? cdiv(max(0, work.end - p.window), S::kKeys) : 0;
    const int top = work.first + work.count - 1;

    Rows<D> rows;
    rows.m[0] = rows.m[1] = -INFINITY, rows.l[0] = rows.l[1] = 0.f;
    float s[64];
    uint32_t weights[8][4];
    float factor[2];
    const auto mask = [&](int i) {
      const int n = top - i;
      if (n >= seen_to || n < seen_from) {
        const int ends[2] = {limit[0] - n * S::kKeys, limit[1] - n * S::kKeys};
        const int begins[2] = {ends[0] - reach, ends[1] - reach};
        hide(s, begins, ends);
      }
    };
    // Scores of a tile to weights.
    const auto weigh = [&](int i) {
      if constexpr (CODES) {
        if (p.by_token) scale_scores<D>(s, smem, tile + i, mine, cap);
      }
      if constexpr (CAP) {
        if (!CODES || !p.by_token) {
#pragma unroll
          for (int j = 0; j < 64; ++j) s[j] = cap(s[j], cap_by[j >> 1 & 1]);
        }
      }
      mask(i);
      const float2 before = make_float2(rows.l[0], rows.l[1]);
      softmax<D>(s, rows, factor, scale_log2);
      if constexpr (CODES) {
        if (p.by_token) {
          const float2 sum = sum_unscaled<D>(s, smem, tile + i);
          rows.l[0] = fmaf(before.x, factor[0], sum.x), rows.l[1] = fmaf(before.y, factor[1], sum.y);
        }
      }
    };
    const auto wait_keys = [&](int i) {
      mbar_wait(bars.k_full(tile + i), Bars<D>::parity(tile + i));
      if constexpr (COPIES == kRowCopies) fence_proxy_async();
    };
    const auto wait_values = [&](int i) {
      mbar_wait(bars.v_full(tile + i), Bars<D>::parity(tile + i));
      if constexpr (COPIES == kRowCopies) fence_proxy_async();
      if (BOXES && i == 0 && work.last_part() && (work.end & (p.box - 1)) != 0) {
        // What follows the last key in its box may be anything, and 0 times that would not be 0.
        const int from = work.end % S::kKeys, rest = p.box - (work.end & (p.box - 1));
        const uint32_t slot = base + S::kV + (tile % S::kStages) * S::kTile + from * 128;
        for (int c = tid; c < rest * (D / 8); c += 128) {
          const int row = c / (D / 8), chunk = c % (D / 8);
          st_shared(slot + (chunk >> 3) * (S::kKeys * 128) + row * 128 + (chunk & 7) * 16,
                    make_uint4(0, 0, 0, 0));
        }
        fence_proxy_async();
        bar_sync(kBarGroup + group, 128);
      }
    };
    const auto keys_at = [&](int i) {
      return swizzle128_descriptor(warp_uniform(base + S::kK + ((tile + i) % S::kStages) * S::kTile));
    };
    const auto values_at = [&](int i) {
      return swizzle128_descriptor(warp_uniform(base + S::kV + ((tile + i) % S::kStages) * S::kTile), 1024,
                                   S::kKeys * 128);
    };
    const auto turn = [&] {
      if (!shared) bar_sync(kBarTurn + group, 256);
    };
    const auto pass = [&] {
      if (!shared) bar_arrive(kBarTurn + (group ^ 1), 256);
    };
    // A tile of the other warpgroup: said to be done with, but not before it is there.
    const auto skip_keys = [&](int i) {
      mbar_wait(bars.k_full(tile + i), Bars<D>::parity(tile + i));
      free_slot(bars.k_empty(tile + i));
    };
    const auto skip_values = [&](int i) {
      mbar_wait(bars.v_full(tile + i), Bars<D>::parity(tile + i));
      free_slot(bars.v_empty(tile + i));
    };

    int i = shared ? group : 0;  // the tile whose scores come next
    if (shared && group == 1 && work.count > 0) skip_keys(0);
    if (i < work.count) {
      wait_keys(i);
      turn();
      wgmma_fence();
      start_scores<T, D>(s, q, keys_at(i));
      pass();
      wgmma_wait<0>();
      wgmma_fence_operand(s);
      free_slot(bars.k_empty(tile + i));
      weigh(i);
      round_weights<T>(s, weights);
      int add = 0;
      if (shared && group == 1) skip_values(0);
#pragma unroll 1
      for (i += step; i < work.count; i += step) {
        if (shared) skip_keys(i - 1);
        wait_keys(i);
        turn();
        wgmma_fence();
        start_scores<T, D>(s, q, keys_at(i));
        wait_values(i - step);
        wgmma_fence_operand(rows.o);
        wgmma_fence();
        start_values<T, D>(rows.o, weights, values_at(i - step), add);
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
        free_slot(bars.v_empty(tile + i - step));
        if (shared) skip_values(i - 1);
        if (__any_sync(0xffffffffu, factor[0] != 1.f || factor[1] != 1.f)) {
#pragma unroll
          for (int j = 0; j < D / 2; ++j) rows.o[j] *= factor[j >> 1 & 1];
        }
        round_weights<T>(s, weights);
        add = 1;
      }
      free_slot(bars.q_empty());
      if (shared && i - step + 1 < work.count) skip_keys(i - step + 1);
      wait_values(i - step);
      turn();
      wgmma_fence();
      start_values<T, D>(rows.o, weights, values_at(i - step), add);
      pass();
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        rows.l[r] += __shfl_xor_sync(0xffffffffu, rows.l[r], 1);
        rows.l[r] += __shfl_xor_sync(0xffffffffu, rows.l[r], 2);
      }
      wgmma_wait<0>();
      wgmma_fence_operand(rows.o);
      free_slot(bars.v_empty(tile + i - step));
      if (shared && i - step + 1 < work.count) skip_values(i - step + 1);
    } else {
      free_slot(bars.q_empty());
      if (work.count > 0) skip_values(0);
#pragma unroll
      for (int j = 0; j < D / 2; ++j) rows.o[j] = 0.f;
    }
    tile += work.count;
    if constexpr (CODES) {
      const float by = p.by_token ? 1.f : p.v_scale[work.head * p.v_scale_head];
#pragma unroll
      for (int j = 0; j < D / 2; ++j) rows.o[j] *= by;
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (rows.m[r] > -INFINITY) rows.m[r] = __fmul_rn(rows.m[r], scale_log2[r]);
    }
    const bool some = row0 + warp * 16 < work.rows;
    if (shared) join<D>(rows, smem, group, some, p.scale_log2);
    if (work.parts() > 1 && work.unit >= 0) {
      add_shared<Out, D>(p, work, rows, smem, group, warp);
    } else if (some && !(shared && group == 1)) {
      if (work.parts() == 1 || add_in_turn<D>(p, work, rows, warp))
        write_rows<Out, D>(p, work, rows, smem, base, row0 + warp * 16);
    }
  }
}

template <typename T, int D, Copies COPIES, bool CAP>
__device__ __forceinline__ void paged_attention(const AttentionParams& p, const CUtensorMap& q_map,
                                                const CUtensorMap& k_map, const CUtensorMap& v_map,
                                                const SoftCap<CAP>& cap) {
  using S = AttentionShape<D>;
  constexpr bool BOXES = COPIES == kBoxCopies;
  extern __shared__ __align__(1024) uint8_t smem[];
  const uint32_t base = smem_u32_once(smem);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
  if (threadIdx.x == 0) {
    const Bars<D> bars{base + S::kBars};
    mbar_init(bars.q_full(), 1), mbar_init(bars.q_empty(), 8 * kArrivingLanes);
    for (int i = 0; i < 2; ++i)
      mbar_init(bars.work_full(i), 1), mbar_init(bars.work_empty(i), (S::kCopying - 1) * kArrivingLanes);
    for (int i = 0; i < S::kStages; ++i) {
      mbar_init(bars.k_full(i), BOXES ? 1 : 128), mbar_init(bars.v_full(i), BOXES ? 1 : 128);
      mbar_init(bars.k_empty(i), 8 * kArrivingLanes), mbar_init(bars.v_empty(i), 8 * kArrivingLanes);
    }
    fence_mbarrier_init();
  }
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  sort_sequences<D>(p, smem);  // begins with a barrier of all threads
  if (warp >= 8) {
    setmaxnreg_dec<COPIES == kCodeCopies ? 72 : 56>();
    if constexpr (BOXES) {
      if (warp - 8 < S::kCopying) produce_boxes<D>(p, q_map, k_map, v_map, smem, base, warp - 8);
    } else if constexpr (COPIES == kRowCopies) {
      produce_rows<D>(p, q_map, smem, base);
    } else {
      produce_codes<D>(p, q_map, smem, base);
    }
    if (threadIdx.x == 256 && atomicAdd(p.counters + 2, 1u) == gridDim.x - 1)
      p.counters[0] = 0, p.counters[1] = 0, p.counters[2] = 0;  // every CTA has asked for the last time
  } else {
    setmaxnreg_inc<COPIES == kCodeCopies ? 216 : 224>();
    multiply<T, D, COPIES, CAP>(p, cap, smem, base, warp >> 2);
  }
}

}  // namespace gm
#endif
