// FlashAttention-3's kernel (Shah et al., 2024) as a template: two or three consumer warpgroups of 64 rows each and a
// producer warpgroup. Q K^T of a tile of keys overlaps with P V of the tile before, and an order barrier alternates
// the consumers, so that one multiplies while the others compute softmax.
//
// Traits K of a kernel:
//   Type, Params, Cap      element type of the products, kernel parameters, soft cap
//   Shape                  kGroups (consumer warpgroups) and the layout of shared memory: kRows, kKeys, kStages (rows
//                          of Q, keys of a tile, slots of a ring), kQueryDim, kValueDim (elements of a head), kK, kV,
//                          kKeyTile, kValueTile (offsets of the rings, bytes of a slot), kBars (offset of the barriers),
//                          kWorkBars (how many are of work tiles) and, if there are any, kCopying (producer warps, of
//                          which one schedules), kKeepsQ (results reuse the memory of Q)
//   kFills, kFence         arrivals that fill a slot; whether the generic proxy writes it
//   kMaps                  tensors that TMA reads: of q alone, or of q, k and v
//   kPairs                 whether tiles without masks have a loop of their own, two at a time, each in its slot
//   kTurns                 whether the consumers issue their products in turn
//   kReloads               whether get_work still has the work tile when its results are written; with kKeepsQ it must
//   kWindow                whether there may be a sliding window, which ends with the keys that a row sees
//   kTwoSided              whether a row's window has an own beginning (first_seen, seen_from), also where the context
//                          ends within it
//   kProducerRegisters, kConsumerRegisters
//   begin, prepare         set-up by all threads, before and after the kernel ahead has ended; one has a barrier of all of them
//   produce                the producer warpgroup
//   Work, get_work         a work tile: rows (0: no more), end (of its keys), first, count (tiles of keys)
//   shares                 whether two consumers have the same rows, and alternate tiles of keys
//   seen, seen_whole       keys visible to a row; tiles that need no causal mask
//   first_seen, seen_from  first key visible to a row; the tile from which on none is hidden at the beginning
//   ends_within, unused    whether keys past the end of the context are copied, and how many
//   Scores                 transformation of the scores: scales and soft cap; and of the sums of their weights
//   finish                 the epilogue
#pragma once
#include <climits>
#include <cstdint>

#include "_attention_types_sm90.cuh"
#include "_bounded_weights_sm90.cuh"
#include "sm90/tma.cuh"
#include "sm90/wgmma.cuh"

#ifdef __CUDACC__
namespace gm {

// Named barriers of a third consumer warpgroup: its turn, and its own.
enum : int { kBarThirdTurn = 7, kBarThird = 8 };
__device__ __forceinline__ int turn_of(int group) { return group < 2 ? kBarOrder + group : kBarThirdTurn; }

template <class S>
struct FlashBars {
  uint32_t base;
  __device__ __forceinline__ uint32_t q_full() const { return base; }
  __device__ __forceinline__ uint32_t q_empty() const { return base + 8; }
  __device__ __forceinline__ uint32_t work_full(int i) const { return base + 16 + (i & 1) * 8; }
  __device__ __forceinline__ uint32_t work_empty(int i) const { return base + 32 + (i & 1) * 8; }
  __device__ __forceinline__ uint32_t k_full(int tile) const {
    return base + 16 + S::kWorkBars * 8 + (tile % S::kStages) * 8;
  }
  __device__ __forceinline__ uint32_t k_empty(int tile) const { return k_full(tile) + S::kStages * 8; }
  __device__ __forceinline__ uint32_t v_full(int tile) const { return k_full(tile) + S::kStages * 16; }
  __device__ __forceinline__ uint32_t v_empty(int tile) const { return k_full(tile) + S::kStages * 24; }
  __device__ __forceinline__ static uint32_t parity(int tile) { return (tile / S::kStages) & 1; }
};

// Accumulators of a warpgroup's 64 rows; a thread has the rows lane / 4 and lane / 4 + 8 of its warp's 16.
template <int D>
struct Accumulators {
  float o[D / 2], m[2], l[2];  // sums of values; row maxima of the raw scores; row sums of weights
  __device__ __forceinline__ void clear() { m[0] = m[1] = -INFINITY, l[0] = l[1] = 0.f; }
};

// The same scale for all rows, with the interface of one per row.
struct UniformScale {
  float value;
  __device__ __forceinline__ float operator[](int) const { return value; }
};

// Online softmax: tile of scores -> weights 2^(scale_log2 (s - m)), in place. factor: rescales the sums so far;
// exactly 1, as 2^0, where a row's maximum stays. scale_log2: by row. Returns a number that is not negative, depends
// on three quarters of a row's weights and on both factors, and is there before the other weights are.
// IN_ORDER: maxima of the second row are computed while the first row's are exchanged and its exponentials begin.
// zero: of opaque_zero.
template <bool IN_ORDER, int N, int D, typename Scale>
__device__ __forceinline__ float softmax(float (&s)[N], Accumulators<D>& acc, float (&factor)[2],
                                         const Scale& scale_log2, uint32_t zero) {
  float base[2], sum[2] = {0.f, 0.f};
  uint32_t nothing = 0;  // that depends on the first row's maximum
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    // Four chains of maxima per row: one takes as long as the latency of all its instructions. ptxas would compute
    // those of both rows before it exchanges any, but not where the second row's depend on the first one's result.
    float chain[4];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const float score = s[(i >> 1) * 4 + r * 2 + (i & 1)];
      chain[i & 3] = i >= 4               ? fmaxf(chain[i & 3], score)
                     : IN_ORDER && r == 1 ? __uint_as_float(__float_as_uint(score) | nothing)
                                          : score;
    }
    float row_max = fmaxf(fmaxf(chain[0], chain[1]), fmaxf(chain[2], chain[3]));
    nothing = __float_as_uint(row_max) & zero;
    row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffffu, row_max, 1));
    row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffffu, row_max, 2));
    const float m = fmaxf(row_max, acc.m[r]);
    // Finite where all keys so far are masked, so that their weights are 0 and not NaN.
    base[r] = fmaxf(__fmul_rn(m, scale_log2[r]), -3e38f);
    factor[r] = exp2_approx(__fmul_rn(acc.m[r], scale_log2[r]) - base[r]);
    acc.m[r] = m;
  }
  float early = 0.f;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i == N * 3 / 4) early = sum[0] + (factor[0] + factor[1]);
    s[i] = exp2_approx(fmaf(s[i], scale_log2[i >> 1 & 1], -base[i >> 1 & 1]));
    sum[i >> 1 & 1] += s[i];
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) acc.l[r] = fmaf(acc.l[r], factor[r], sum[r]);
  return early;
}

// The descriptor of shared memory `units` of 16 bytes further on: its address is in the low half, and a 64-bit sum
// would also add to the high one, for each product anew. Heads of 256 elements have no registers for that.
template <int D>
__device__ __forceinline__ uint64_t advanced(uint64_t descriptor, uint32_t units) {
  if constexpr (D > 192) return descriptor + units;
  return (descriptor >> 32 << 32) | (static_cast<uint32_t>(descriptor) + units);
}

// Zeros the values of `count` keys from `from` on, past the end of the context: they may be NaN, which a weight of
// 0 would not remove. By a warpgroup.
template <class S>
__device__ __forceinline__ void clear_values(uint32_t slot, int from, int count, int group) {
  slot += from * 128;
  for (int c = threadIdx.x & 127; c < count * (S::kValueDim / 8); c += 128) {
    const int row = c / (S::kValueDim / 8), chunk = c % (S::kValueDim / 8);
    st_shared(slot + (chunk >> 3) * (S::kKeys * 128) + row * 128 + (chunk & 7) * 16, make_uint4(0, 0, 0, 0));
  }
  fence_proxy_async();
  bar_sync(group < 2 ? kBarGroup + group : kBarThird, 128);
}

// A consumer warpgroup: its rows, or its tiles of keys, of every work tile.
template <class K>
__device__ __forceinline__ void consume(const typename K::Params& p, const typename K::Cap& cap,
                                        uint8_t* smem, uint32_t base, int group) {
  using T = typename K::Type;
  using S = typename K::Shape;
  constexpr int kKeys = S::kKeys, D = S::kValueDim;
  const FlashBars<S> bars{base + S::kBars};
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
  constexpr int kGroups = S::kGroups;
  const auto next_turn = [&] {
    return turn_of(kGroups == 2 ? group ^ 1 : group + 1 < kGroups ? group + 1 : 0);
  };
  if (K::kTurns && group == kGroups - 1) bar_arrive(kBarOrder, 256);  // warpgroup 0 goes first
  int tile = 0;
  const uint32_t zero = opaque_zero();
#pragma unroll 1
  for (uint32_t q_parity = 0;; q_parity ^= 1) {
    mbar_wait(bars.q_full(), q_parity);
    typename K::Work work = K::get_work(smem, q_parity);
    if (work.rows == 0) break;
    const bool shared = kGroups == 2 && K::shares(p, work);
    const int row0 = shared ? 0 : group * 64, step = shared ? 2 : 1;
    const uint64_t q = swizzle128_descriptor(warp_uniform(base + row0 * 128));
    const int mine = row0 + warp * 16 + (lane >> 2), none = 1 << 30;
    typename K::Scores scores(p, cap, smem, work, row0, mine, shared, group);
    int limit[2], begin[2];  // end and beginning of the keys its rows see, less the thread's first column
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      limit[r] = min(K::seen(p, work, mine + r * 8), work.end) - (lane & 3) * 2;
      if constexpr (K::kTwoSided) begin[r] = K::first_seen(p, work, mine + r * 8) - (lane & 3) * 2;
    }
    int window = 0;
    if constexpr (K::kWindow && !K::kTwoSided) window = p.window;
    const int reach = window > 0 ? window : none;
    // Tiles seen_from .. seen_to need no mask.
    const int seen_to = K::seen_whole(p, work, group);
    int seen_from = window > 0 ? cdiv(max(0, work.end - window), kKeys) : 0;
    if constexpr (K::kTwoSided) seen_from = K::seen_from(p, work);
    const int top = work.first + work.count - 1;

    Accumulators<D> acc;
    acc.clear();
    float s[kKeys / 2], factor[2] = {1.f, 1.f};
    // Whether scores are those of bounded_weights, which are made of inverses once their place is free.
    const bool bounded = K::Scores::kBounded && scores.in_pairs(cap);
    float rounded[2] = {0.f, 0.f};
    uint32_t weights[kKeys / 16][4];
    // Turns the scores of a tile into weights, or bounded ones into inverses. Returns a number as softmax does.
    const auto softmax_tile = [&](int i) {
      if (!bounded) scores.template adjust<false>(p, cap, smem, mine, s, tile + i);
      const int n = top - i;
      const bool masked = n >= seen_to || (K::kWindow && n < seen_from);
      int begins[2], ends[2];
      if (masked) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          ends[r] = limit[r] - n * kKeys;
          begins[r] = K::kTwoSided ? begin[r] - n * kKeys : K::kWindow ? ends[r] - reach : INT_MIN;
        }
        mask_scores(s, begins, ends, bounded ? 0.f : -INFINITY);
      }
      if constexpr (K::Scores::kBounded) {
        if (bounded) {
          cap.to_inverses(s);  // what is hidden may be no number: it was a score of 0
          if (masked) mask_scores(s, begins, ends, INFINITY);
          return some_of(s);
        }
      }
      const float2 before = make_float2(acc.l[0], acc.l[1]);
      const float early = softmax<false>(s, acc, factor, scores.scale_log2, zero);
      scores.adjust_sums(p, smem, s, acc, before, factor, tile + i);
      return early;
    };
    const auto values_landed = [&](int i) {
      if (i == 0 && K::ends_within(p, work))
        clear_values<S>(base + S::kV + (tile % S::kStages) * S::kValueTile, work.end % kKeys,
                        K::unused(p, work), group);
    };
    const auto release = [&](uint32_t bar) {
      if (lane < kArrivingLanes) mbar_arrive(bar);
    };
    const auto issue_qk = [&](uint32_t keys) {
      const uint64_t k = swizzle128_descriptor(keys);
#pragma unroll
      for (int j = 0; j < S::kQueryDim / 16; ++j)
        Wgmma<T, kKeys>::ss(s, advanced<S::kQueryDim>(q, (j >> 2) * (S::kRows * 128 >> 4) + (j & 3) * 2),
                            advanced<S::kQueryDim>(k, (j >> 2) * (kKeys * 128 >> 4) + (j & 3) * 2), j > 0);
      wgmma_commit();
    };
    const auto issue_pv = [&](uint32_t values, int add) {
      const uint64_t v = swizzle128_descriptor(values, 1024, kKeys * 128);
#pragma unroll
      for (int j = 0; j < kKeys / 16; ++j)
        Wgmma<T, D>::template rs<kMajorMN>(acc.o, weights[j], advanced<S::kQueryDim>(v, j * (2048 >> 4)),
                                           j > 0 ? 1 : add);
      wgmma_commit();
    };
    const auto keys_of = [&](int i) {
      return warp_uniform(base + S::kK + ((tile + i) % S::kStages) * S::kKeyTile);
    };
    const auto values_of = [&](int i) {
      return warp_uniform(base + S::kV + ((tile + i) % S::kStages) * S::kValueTile);
    };
    const auto rescale_always = [&] {
#pragma unroll
      for (int j = 0; j < D / 2; ++j) acc.o[j] *= factor[j >> 1 & 1];
    };
    const auto rescale = [&] {
      if (__any_sync(0xffffffffu, factor[0] != 1.f || factor[1] != 1.f)) rescale_always();
    };
    const auto convert_weights = [&] {
      if constexpr (K::Scores::kBounded) {
        if (bounded) return bounded_weights(s, cap, acc.l, rounded, weights);
      }
#pragma unroll
      for (int j = 0; j < kKeys / 4; ++j) weights[j >> 2][j & 3] = packed<T>(s[2 * j], s[2 * j + 1]);
    };
    const auto wait_keys = [&](int i) {
      mbar_wait(bars.k_full(tile + i), bars.parity(tile + i));
      if constexpr (K::kFence) fence_proxy_async();
    };
    const auto wait_values = [&](int i) {
      mbar_wait(bars.v_full(tile + i), bars.parity(tile + i));
      if constexpr (K::kFence) fence_proxy_async();
      values_landed(i);
    };
    const auto order_wait = [&] {
      if (K::kTurns && !shared) bar_sync(turn_of(group), 256);
    };
    const auto order_arrive = [&] {
      if (K::kTurns && !shared) bar_arrive(next_turn(), 256);
    };
    // Once the scores of tile i are there, Q's place is free if they are the last ones: the next Q arrives during the
    // softmax and the products that are left. Rows of codes have scales until the end.
    constexpr bool kFreesQ = !S::kKeepsQ && K::kPairs;
    const auto free_q = [&](int i) {
      if (kFreesQ && i + step >= work.count) release(bars.q_empty());
    };
    // Releases a tile of the other warpgroup, once it has landed.
    const auto skip_keys = [&](int i) {
      mbar_wait(bars.k_full(tile + i), bars.parity(tile + i));
      release(bars.k_empty(tile + i));
    };
    const auto skip_values = [&](int i) {
      mbar_wait(bars.v_full(tile + i), bars.parity(tile + i));
      release(bars.v_empty(tile + i));
    };

    // Whether the last exponentials of a step hide what follows the products of the values: wide heads have no registers
    // for it, and over codes all tiles wait behind them.
    constexpr bool kHides = D <= 128 && K::kPairs;

    // A tile of scores without masks in slot SLOT, and the values of the tile before in the other one. parity: of the
    // slots of the keys.
    const auto plain_step = [&](auto slot, int i, uint32_t parity) {
      constexpr int kSlot = decltype(slot)::value, kOther = kSlot ^ 1;
      mbar_wait(bars.k_full(kSlot), parity);
      if constexpr (K::kFence) fence_proxy_async();
      if constexpr (K::kTurns) bar_sync(turn_of(group), 256);
      wgmma_fence();
      issue_qk(base + S::kK + kSlot * S::kKeyTile);
      mbar_wait(bars.v_full(kOther), kSlot == 0 ? parity ^ 1 : parity);
      if constexpr (K::kFence) fence_proxy_async();
      wgmma_fence_operand(acc.o);
      wgmma_fence();
      issue_pv(base + S::kV + kOther * S::kValueTile, 1);
      if constexpr (K::kTurns) bar_arrive(next_turn(), 256);
      wgmma_wait<1>();
      wgmma_fence_operand(s);
      release(bars.k_empty(kSlot));
      if constexpr (kSlot == 1) free_q(i);
      if constexpr (K::Scores::kBounded) {
        cap.to_inverses(s);
        if (some_of(s) < 0.f) mbar_arrive(bars.q_full());  // never, as below
        wgmma_wait<0>();
        wgmma_fence_operand(acc.o);
        release(bars.v_empty(kOther));
        bounded_weights(s, cap, acc.l, rounded, weights);
        return;
      }
      scores.template adjust<true>(p, cap, smem, mine, s, tile + i);
      const float2 before = make_float2(acc.l[0], acc.l[1]);
      const float early = softmax<(D <= 128)>(s, acc, factor, scores.scale_log2, zero);
      scores.adjust_sums(p, smem, s, acc, before, factor, tile + i);
      if constexpr (kHides) {
        // Never true, since weights and factors are not negative. ptxas would hoist the wait above all exponentials,
        // but not above what such a branch needs: by then the products are done, and the exponentials that are left
        // hide rescaling, by 1 where the maxima stay, and conversion.
        if (early < 0.f) mbar_arrive(bars.q_full());
        wgmma_wait<0>();
        wgmma_fence_operand(acc.o);
        release(bars.v_empty(kOther));
        rescale_always();
      } else {
        wgmma_fence_operand(s);
        if (acc.l[0] + acc.l[1] < 0.f) mbar_arrive(bars.q_full());  // as below
        wgmma_wait<0>();
        wgmma_fence_operand(acc.o);
        release(bars.v_empty(kOther));
        rescale();
      }
      convert_weights();
    };

    int i = shared ? group : 0;  // the tile whose scores come next
    if (shared && group == 1 && work.count > 0) skip_keys(0);
    if (i < work.count) {
      wait_keys(i);
      order_wait();
      wgmma_fence();
      issue_qk(keys_of(i));
      order_arrive();
      wgmma_wait<0>();
      wgmma_fence_operand(s);
      release(bars.k_empty(tile + i));
      free_q(i);
      softmax_tile(i);
      convert_weights();
      int add = 0;
      if (shared && group == 1) skip_values(0);
#pragma unroll 1
      for (i += step; i < work.count; i += step) {
        // Tiles in pairs, each in its slot, as long as no key is masked and the values of tile 0 are behind.
        if constexpr (K::kPairs) {
          if (!shared && i > 1 && (tile + i) % 2 == 0 && top - i < seen_to && scores.in_pairs(cap)) {
            const int unmasked =
                K::kWindow ? top - seen_from + 1 : work.count;  // the end of the tiles without a mask
            uint32_t parity = bars.parity(tile + i);
#pragma unroll 1
            for (; i + 1 < min(unmasked, work.count); i += 2, parity ^= 1) {
              plain_step(std::integral_constant<int, 0>(), i, parity);
              // Never, but ptxas would convert the weights after the wait for the next turn. Without a window it
              // derives that `top` is not negative.
              if (K::kWindow && kGroups == 2 ? top < -1 : zero != 0) break;
              plain_step(std::integral_constant<int, 1>(), i + 1, parity);
            }
            if (i >= work.count) break;
          }
        }
        if (shared) skip_keys(i - 1);
        wait_keys(i);
        order_wait();
        wgmma_fence();
        issue_qk(keys_of(i));
        wait_values(i - step);
        wgmma_fence_operand(acc.o);
        wgmma_fence();
        issue_pv(values_of(i - step), add);
        order_arrive();
        wgmma_wait<1>();
        wgmma_fence_operand(s);
        release(bars.k_empty(tile + i));
        free_q(i);
        const float early = softmax_tile(i);
        if constexpr (kHides) {
          if (early < 0.f) mbar_arrive(bars.q_full());  // as in plain_step
          wgmma_wait<0>();
          wgmma_fence_operand(acc.o);
          release(bars.v_empty(tile + i - step));
          if (shared) skip_values(i - 1);
          rescale_always();
          convert_weights();
          add = 1;
          continue;
        }
        wgmma_fence_operand(s);
        // Never true, since sums of weights are not negative. ptxas would hoist the wait above the exponentials, but
        // not across such a branch. tests/kernels/test_sm90_cubins.py checks the order.
        if ((bounded ? early : acc.l[0] + acc.l[1]) < 0.f) mbar_arrive(bars.q_full());
        wgmma_wait<0>();
        wgmma_fence_operand(acc.o);
        release(bars.v_empty(tile + i - step));
        if (shared) skip_values(i - 1);
        rescale();
        convert_weights();
        add = 1;
      }
      if constexpr (!S::kKeepsQ && !kFreesQ) release(bars.q_empty());
      if (shared && i - step + 1 < work.count) skip_keys(i - step + 1);
      wait_values(i - step);
      order_wait();
      wgmma_fence();
      issue_pv(values_of(i - step), add);
      order_arrive();
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        acc.l[r] += __shfl_xor_sync(0xffffffffu, acc.l[r], 1);
        acc.l[r] += __shfl_xor_sync(0xffffffffu, acc.l[r], 2);
        if constexpr (K::Scores::kBounded) {
          rounded[r] += __shfl_xor_sync(0xffffffffu, rounded[r], 1);
          rounded[r] += __shfl_xor_sync(0xffffffffu, rounded[r], 2);
          // All that follows divides by the sum of the weights, for which this then is the maximum.
          if (bounded) acc.m[r] = acc.l[r] == 0.f ? -INFINITY : cap.fraction();
          factor[r] = bounded && acc.l[r] != 0.f ? __fdividef(acc.l[r], rounded[r]) : 1.f;
        }
      }
      wgmma_wait<0>();
      wgmma_fence_operand(acc.o);
      if constexpr (K::Scores::kBounded) rescale_always();
      release(bars.v_empty(tile + i - step));
      if (shared && i - step + 1 < work.count) skip_values(i - step + 1);
    } else {
      if constexpr (!S::kKeepsQ) release(bars.q_empty());
      if (work.count > 0) skip_values(0);
#pragma unroll
      for (int j = 0; j < D / 2; ++j) acc.o[j] = 0.f;
    }
    tile += work.count;
    scores.finish(p, work, acc);
    if constexpr (S::kKeepsQ || K::kReloads)
      work = K::get_work(smem, q_parity);  // reloaded, since the loop has no registers for it
    K::finish(p, work, acc, smem, base, group, warp, shared);
    if constexpr (S::kKeepsQ) {
      fence_proxy_async();  // Q of the next work tile overwrites the staged results
      __syncwarp();
      release(bars.q_empty());
    }
  }
}

template <class K>
__device__ __forceinline__ void flash_attention(const typename K::Params& p, const CUtensorMap& q_map,
                                                const CUtensorMap& k_map, const CUtensorMap& v_map,
                                                const typename K::Cap& cap) {
  using S = typename K::Shape;
  extern __shared__ __align__(1024) uint8_t smem[];
  const uint32_t base = smem_u32_once(smem);
  constexpr int kWarps = S::kGroups * 4;  // that multiply
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
  if (threadIdx.x == 0) {
    const FlashBars<S> bars{base + S::kBars};
    mbar_init(bars.q_full(), 1), mbar_init(bars.q_empty(), kWarps * kArrivingLanes);
    if constexpr (S::kWorkBars > 0)
      for (int i = 0; i < 2; ++i)
        mbar_init(bars.work_full(i), 1), mbar_init(bars.work_empty(i), (S::kCopying - 1) * kArrivingLanes);
    for (int i = 0; i < S::kStages; ++i) {
      mbar_init(bars.k_full(i), K::kFills), mbar_init(bars.v_full(i), K::kFills);
      mbar_init(bars.k_empty(i), kWarps * kArrivingLanes),
          mbar_init(bars.v_empty(i), kWarps * kArrivingLanes);
    }
    fence_mbarrier_init();
  }
  // The first use of maps would wait for them; they are constant, unlike what they describe.
  if (threadIdx.x == kWarps * 32) {
    prefetch_tensormap(&q_map);
    if constexpr (K::kMaps == 3) prefetch_tensormap(&k_map), prefetch_tensormap(&v_map);
  }
  K::begin(smem);
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  K::prepare(p, smem);
  if (warp >= kWarps) {
    setmaxnreg_dec<K::kProducerRegisters>();
    K::produce(p, q_map, k_map, v_map, smem, base, warp - kWarps);
  } else {
    setmaxnreg_inc<K::kConsumerRegisters>();
    consume<K>(p, cap, smem, base, warp >> 2);
  }
}

}  // namespace gm
#endif
