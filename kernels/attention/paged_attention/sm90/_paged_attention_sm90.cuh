// Causal attention over a paged cache for Hopper: prefill, chunks and decodes of one batch in one launch.
//
// FlashAttention-3's loop (_flash_sm90.cuh) with two consumer warpgroups and a producer warpgroup. Beyond it:
//  - rows are (query, head of the KV group) pairs, and a page is a box of TMA (pages of a multiple of 8 tokens;
//    others are copied by cp.async);
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
#include "attention/sm90/_flash_sm90.cuh"
#include "attention/sm90/_soft_cap_sm90.cuh"

#ifdef __CUDACC__
namespace gm {

// Traits of flash_attention. T: of the products. CAP: scores have a soft cap.
template <typename T, int D, Copies COPIES, bool CAP>
struct Paged {
  using Type = T;
  using Params = AttentionParams;
  using Cap = SoftCap<CAP>;
  using Shape = AttentionShape<D>;
  using Work = gm::Work;
  using Out = std::conditional_t<COPIES == kCodeCopies, EitherHalf, T>;
  static constexpr bool kCodes = COPIES == kCodeCopies, kFence = COPIES == kRowCopies, kWindow = true;
  static constexpr int kFills = COPIES == kBoxCopies ? 1 : 128;
  static constexpr int kProducerRegisters = kCodes ? 72 : Shape::kProducerRegisters,
                       kConsumerRegisters = kCodes ? 216 : Shape::kConsumerRegisters;

  static __device__ __forceinline__ void prepare(const Params& p, uint8_t* smem) {
    sort_sequences<D>(p, smem);
  }

  static __device__ __forceinline__ void produce(const Params& p, const CUtensorMap& q_map,
                                                 const CUtensorMap& k_map, const CUtensorMap& v_map,
                                                 uint8_t* smem, uint32_t base, int warp) {
    if constexpr (COPIES == kBoxCopies) {
      if (warp < Shape::kCopying) produce_boxes<D>(p, q_map, k_map, v_map, smem, base, warp);
    } else {
      produce_rows<D, kCodes>(p, q_map, smem, base);
    }
    if (threadIdx.x == 256 && atomicAdd(p.counters + 2, 1u) == gridDim.x - 1)
      p.counters[0] = 0, p.counters[1] = 0, p.counters[2] = 0;  // every CTA has fetched its last piece
  }

  static __device__ __forceinline__ Work get_work(const uint8_t* smem) {
    return gm::get_work(smem + Shape::kWork);
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
    std::conditional_t<kCodes, float[2], SameScale> scale_log2;  // of the scores, or of the capped ones
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
    // Scores of a tile to those that softmax takes.
    template <int N>
    __device__ __forceinline__ void adjust(const Params& p, const Cap& cap, const uint8_t* smem, int mine,
                                           float (&s)[N], int tile) const {
      if constexpr (kCodes) {
        if (p.by_token) scale_scores<D>(s, smem, tile, mine, cap);
      }
      if constexpr (CAP) {
        if (!kCodes || !p.by_token) {
#pragma unroll
          for (int j = 0; j < N; ++j) s[j] = cap(s[j], cap_by[j >> 1 & 1]);
        }
      }
    }
    // Sums of weights that have the scales of values in them. before: those without this tile.
    template <int N>
    __device__ __forceinline__ void adjust_sums(const Params& p, const uint8_t* smem, const float (&s)[N],
                                                Rows<D>& rows, float2 before, const float (&factor)[2],
                                                int tile) const {
      if constexpr (kCodes) {
        if (p.by_token) {
          const float2 sum = sum_unscaled<D>(s, smem, tile);
          rows.l[0] = fmaf(before.x, factor[0], sum.x), rows.l[1] = fmaf(before.y, factor[1], sum.y);
        }
      }
    }
    __device__ __forceinline__ void finish(const Params& p, const Work& work, Rows<D>& rows) const {
      if constexpr (kCodes) {
        const float by = p.by_token ? 1.f : p.v_scale[work.head * p.v_scale_head];
#pragma unroll
        for (int j = 0; j < D / 2; ++j) rows.o[j] *= by;
#pragma unroll
        for (int r = 0; r < 2; ++r)
          if (rows.m[r] > -INFINITY) rows.m[r] = __fmul_rn(rows.m[r], scale_log2[r]);
      }
    }
  };

  static __device__ __forceinline__ void finish(const Params& p, const Work& work, Rows<D>& rows,
                                                uint8_t* smem, uint32_t base, int group, int warp,
                                                bool shared) {
    const int row0 = (shared ? 0 : group * 64) + warp * 16;
    const bool some = row0 < work.rows;
    if (shared)
      join<D>(rows, smem, group, some, p.scale_log2);  // begins with a barrier of both
    else if constexpr (Shape::kKeepsQ)
      bar_sync(kBarBoth, 256);  // both are done with Q
    if (work.parts() > 1 && work.unit >= 0) {
      add_shared<Out, D>(p, work, rows, smem, group, warp);
    } else if (some && !(shared && group == 1)) {
      if (work.parts() == 1 || add_in_turn<D>(p, work, rows, warp))
        write_rows<Out, D>(p, work, rows, smem, base, row0);
    }
  }
};

template <typename T, int D, Copies COPIES, bool CAP>
__device__ __forceinline__ void paged_attention(const AttentionParams& p, const CUtensorMap& q_map,
                                                const CUtensorMap& k_map, const CUtensorMap& v_map,
                                                const SoftCap<CAP>& cap) {
  flash_attention<Paged<T, D, COPIES, CAP>>(p, q_map, k_map, v_map, cap);
}

}  // namespace gm
#endif
