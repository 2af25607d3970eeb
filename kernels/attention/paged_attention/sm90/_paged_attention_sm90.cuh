// Causal attention over a paged cache for Hopper: prefill, chunks and decodes of one batch in one launch.
//
// FlashAttention-3's loop (_flash_sm90.cuh) with two consumer warpgroups and a producer warpgroup. Beyond it:
//  - rows are (query, head of the KV group) pairs, and pages of a multiple of 8 tokens are TMA boxes (others are
//    copied by cp.async);
//  - a dynamic persistent scheduler without a plan from the host: CTAs derive the same order of work tiles from
//    query_start and seq_lens, and fetch the next one by an atomic counter. Long and short sequences have a counter
//    each, so that prefill, bound by math, and decode, bound by memory, overlap;
//  - where a sequence has at most 64 rows, the two warpgroups alternate tiles of keys and merge their results;
//  - sums are rescaled by exactly 1 where a row's maximum stays, and not at all where those of a warp do; tiles of
//    keys are aligned to their size. So a row's result is batch invariant; without parts and shared keys it does not
//    depend on the number of queries of its own sequence either.
#pragma once
#include "attention/sm90/_attention_codes_sm90.cuh"
#include "attention/sm90/_attention_copy_sm90.cuh"
#include "attention/sm90/_attention_rows_sm90.cuh"
#include "attention/sm90/_flash_sm90.cuh"
#include "attention/sm90/_soft_cap_sm90.cuh"

#ifdef __CUDACC__
namespace gm {

// Traits of flash_attention. T: of the products. CAP: scores have a soft cap.
template <typename T, int D, Copies COPIES, bool CAP, int GROUPS>
struct Paged {
  using Type = T;
  using Params = AttentionParams;
  using Cap = SoftCap<CAP>;
  using Shape = AttentionShape<D, GROUPS>;
  using Work = gm::Work;
  using Out = std::conditional_t<COPIES == kCodeCopies, RuntimeHalf, T>;
  static constexpr bool kCodes = COPIES == kCodeCopies, kFence = COPIES == kRowCopies, kWindow = true;
  static constexpr bool kStores = write_rows_by_tma<Out, Shape>;
  static constexpr bool kTwoSided = false, kPairs = !kCodes, kReloads = !kCodes;
  // Heads of 256 are faster without, but slower with a cap, whose exponentials take longer than the products.
  static constexpr bool kTurns = D <= 128 || CAP;
  static constexpr int kFills = COPIES == kBoxCopies ? 1 : 128, kMaps = COPIES == kBoxCopies ? 3 : 1;
  static constexpr int kProducerRegisters = kCodes ? 72 : Shape::kProducerRegisters,
                       kConsumerRegisters = kCodes ? 216 : Shape::kConsumerRegisters;

  static __device__ __forceinline__ void begin(uint8_t* smem) { clear_totals<Shape>(smem); }
  static __device__ __forceinline__ void prepare(const Params& p, uint8_t* smem) {
    sort_sequences<Shape>(p, smem);
    // The page table of one sequence is read while the scheduler warp waits for its length: a word of each sector, so
    // that the L1 cache has it when pages are looked up. The words go where the sort keys of sequences would be.
    const int i = static_cast<int>(threadIdx.x);
    if (p.seqs == 1 && i < GROUPS * 128 && i < p.columns / 8)
      reinterpret_cast<int*>(smem + Shape::kCosts)[i] = p.table[i * 8];
  }

  static __device__ __forceinline__ void produce(const Params& p, const CUtensorMap& q_map,
                                                 const CUtensorMap& k_map, const CUtensorMap& v_map,
                                                 uint8_t* smem, uint32_t base, int warp) {
    if constexpr (COPIES == kBoxCopies) {
      if (warp < Shape::kCopying) produce_boxes<Shape>(p, q_map, k_map, v_map, smem, base, warp);
    } else {
      produce_rows<D, kCodes>(p, q_map, smem, base);
    }
    if (threadIdx.x == GROUPS * 128 && atomicAdd(p.counters + 2, 1u) == gridDim.x - 1)
      p.counters[0] = 0, p.counters[1] = 0, p.counters[2] = 0;  // every CTA has fetched its last work tile
  }

  // parity: of the work tile, where the consumers have two places.
  static __device__ __forceinline__ Work get_work(const uint8_t* smem, uint32_t parity = 0) {
    return gm::get_work(smem + Shape::kWork + parity * Shape::kNextWork);
  }
  static __device__ __forceinline__ bool shares(const Params& p, const Work& work) {
    return work.rows <= p.shared_rows;
  }
  static __device__ __forceinline__ int seen(const Params& p, const Work& work, int row) {
    return work.position + static_cast<int>(row * p.by_group >> 16) + 1;
  }
  static __device__ __forceinline__ int seen_whole(const Params& p, const Work& work, int) {
    return (max(0, work.position) + 1) / Shape::kKeys;
  }
  static __device__ __forceinline__ bool ends_within(const Params& p, const Work& work) {
    return COPIES == kBoxCopies && work.last_part() && (work.end & (p.box - 1)) != 0;
  }
  static __device__ __forceinline__ int unused(const Params& p, const Work& work) {
    return p.box - (work.end & (p.box - 1));
  }

  struct Scores {
    // Whether weights under small caps are bounded_weights, which fp16 cannot hold.
    static constexpr bool kBounded = CAP && std::is_same_v<T, __nv_bfloat16>;
    std::conditional_t<kCodes, float[2], UniformScale> scale_log2;  // of the (capped) scores
    float cap_by[2];
    __device__ __forceinline__ Scores(const Params& p, const Cap& cap, uint8_t* smem, const Work& work,
                                      int row0, int mine, bool shared, int group)
        : cap_by{cap.in, cap.in} {
      if constexpr (kCodes) {
        if (!shared || group == 0)
          convert_queries<D>(p, smem, row0, p.by_token ? 1.f : p.k_scale[work.head * p.k_scale_head]);
        if (shared)
          bar_sync(kBarBoth, 256);
        else
          bar_sync(kBarGroup + group, 128);
        const float* const scales = reinterpret_cast<const float*>(smem + Shape::kRowScales) + mine;
        scale_log2[0] = p.by_token ? 1.f : scales[0], scale_log2[1] = p.by_token ? 1.f : scales[8];
        if constexpr (CAP) {
          cap_by[0] *= scale_log2[0], cap_by[1] *= scale_log2[1];
          scale_log2[0] = scale_log2[1] = 1.f;
        }
      } else {
        scale_log2.value = p.scale_log2;
      }
    }
    // Whether tiles without masks run in pairs: for large caps they do not, so that the loop has one formula.
    static __device__ __forceinline__ bool in_pairs(const Cap& cap) { return cap.is_small(); }
    // Applies scales and soft cap to the scores of a tile. PAIRS: in the loop over pairs.
    template <bool PAIRS, int N>
    __device__ __forceinline__ void adjust(const Params& p, const Cap& cap, const uint8_t* smem, int mine,
                                           float (&s)[N], int tile) const {
      if constexpr (kCodes) {
        if (p.by_token) scale_scores<D>(s, smem, tile, mine, cap);
      }
      if constexpr (CAP) {
        if (PAIRS || (!kCodes && cap.is_small())) {
          cap.quickly(s, cap_by);
        } else if (!kCodes || !p.by_token) {
#pragma unroll
          for (int j = 0; j < N; ++j) s[j] = cap(s[j], cap_by[j >> 1 & 1]);
        }
      }
    }
    // Corrects the sums of weights, which include the scales of values. before: the sums without this tile.
    template <int N>
    __device__ __forceinline__ void adjust_sums(const Params& p, const uint8_t* smem, const float (&s)[N],
                                                Accumulators<D>& acc, float2 before, const float (&factor)[2],
                                                int tile) const {
      if constexpr (kCodes) {
        if (p.by_token) {
          const float2 sum = sum_unscaled<D>(s, smem, tile);
          acc.l[0] = fmaf(before.x, factor[0], sum.x), acc.l[1] = fmaf(before.y, factor[1], sum.y);
        }
      }
    }
    __device__ __forceinline__ void finish(const Params& p, const Work& work, Accumulators<D>& acc) const {
      if constexpr (kCodes) {
        const float by = p.by_token ? 1.f : p.v_scale[work.head * p.v_scale_head];
#pragma unroll
        for (int j = 0; j < D / 2; ++j) acc.o[j] *= by;
#pragma unroll
        for (int r = 0; r < 2; ++r)
          if (acc.m[r] > -INFINITY) acc.m[r] = __fmul_rn(acc.m[r], scale_log2[r]);
      }
    }
  };

  static __device__ __forceinline__ void finish(const Params& p, const Work& work, Accumulators<D>& acc,
                                                uint8_t* smem, uint32_t base, int group, int warp,
                                                bool shared) {
    const int row0 = (shared ? 0 : group * 64) + warp * 16;
    const bool some = row0 < work.rows;
    if constexpr (GROUPS == 3) {
      if (some) write_rows<Out, Shape>(p, work, acc, smem, base, row0);
      return;
    }
    if constexpr (kStores) await_stores();  // of the work tile before
    if (shared)
      merge_warpgroups<Shape>(acc, smem, group, some,
                              p.scale_log2);  // begins with a barrier of both warpgroups
    else if constexpr (Shape::kKeepsQ)
      bar_sync(kBarBoth, 256);  // both are done with Q
    if (work.parts() > 1 && work.unit >= 0) {
      reduce_parts<Out, Shape>(p, work, acc, smem, group, warp);
    } else if (some && !(shared && group == 1)) {
      if (work.parts() == 1 || accumulate_part<Shape>(p, work, acc, warp))
        write_rows<Out, Shape>(p, work, acc, smem, base, row0);
    }
  }
};

template <typename T, int D, Copies COPIES, bool CAP, int GROUPS>
__device__ __forceinline__ void paged_attention(const AttentionParams& p, const CUtensorMap& q_map,
                                                const CUtensorMap& k_map, const CUtensorMap& v_map,
                                                const SoftCap<CAP>& cap) {
  using Traits = Paged<T, D, COPIES, CAP, GROUPS>;
  flash_attention<Traits>(p, q_map, k_map, v_map, cap);
  if (Traits::kStores && threadIdx.x < GROUPS * 128)
    await_stores();  // before the shared memory is another CTA's
}

}  // namespace gm
#endif
