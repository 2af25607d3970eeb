// Producer of attention on Hopper for pages of any size, by cp.async, and for caches of e4m3 codes: keys, values
// and queries are converted to fp16 in shared memory; scales are applied to scores and accumulators.
#pragma once
#include "_attention_copy_sm90.cuh"
#include "_attention_types_sm90.cuh"
#include "_soft_cap_sm90.cuh"

#ifdef __CUDACC__
namespace gm {

// Copies 32 rows of a tile of keys or values from row0 on, 16 bytes per lane; e4m3 codes (CODES) to their staging
// place (S::kCodes). id, slot: page and slot of this lane's row, id < 0 for zeros. By one warp.
template <int D, bool CODES>
__device__ __forceinline__ void copy_rows(int dim, const char* cache, int64_t block, int64_t slot_bytes,
                                          int id, int slot, int row0, uint32_t to) {
  using S = AttentionShape<D>;
  constexpr int kElements = CODES ? 16 : 8;                     // of 16 bytes
  constexpr int kChunks = D / kElements, kStep = 32 / kChunks;  // 16-byte chunks of a row; rows at a time
  const int lane = threadIdx.x & 31, chunk = lane % kChunks;
  const char* const from = cache + chunk * 16;
#pragma unroll 4
  for (int i = 0; i < 32; i += kStep) {
    const int of = i + lane / kChunks, row = row0 + of;
    const int page = __shfl_sync(0xffffffffu, id, of), at = __shfl_sync(0xffffffffu, slot, of);
    const bool there = page >= 0 && chunk * kElements < dim;
    cp_async_16(
        to + row * 128 +
            (CODES ? S::kCodes + chunk * 16 : (chunk >> 3) * (S::kKeys * 128) + ((chunk ^ row) & 7) * 16),
        there ? from + page * block + at * slot_bytes : cache, there ? 16 : 0);
  }
}

// Converts the codes that this thread has copied to fp16 in the 128-byte swizzle, each row in place.
template <int D>
__device__ __forceinline__ void convert_codes(int row0, uint32_t tile) {
  using S = AttentionShape<D>;
  constexpr int kChunks = D / 16, kStep = 32 / kChunks;
  const int lane = threadIdx.x & 31, chunk = lane % kChunks, half = chunk >> 2;
#pragma unroll 2
  for (int i = 0; i < 32; i += kStep) {
    const int row = row0 + i + lane / kChunks;
    const uint4 codes = ld_shared<uint4>(tile + S::kCodes + row * 128 + chunk * 16);
    __syncwarp();  // the stores below overwrite what other lanes read
    const uint2 a = e4m3_to_f16(codes.x), b = e4m3_to_f16(codes.y), c = e4m3_to_f16(codes.z),
                d = e4m3_to_f16(codes.w);
    const uint4 low = make_uint4(a.x, a.y, b.x, b.y), high = make_uint4(c.x, c.y, d.x, d.y);
    const uint32_t at = tile + half * (S::kKeys * 128) + row * 128, place = ((chunk * 2) ^ row) & 7;
    // Lanes of the second half store the other vector first, so that eight lanes have no bank conflicts.
    st_shared(at + (place ^ half) * 16, half ? high : low);
    st_shared(at + (place ^ half ^ 1) * 16, half ? low : high);
  }
}

// Stores the scales of a key that has its own: of the key, log2 of that of its values, and the reciprocal of the
// latter. tile: counted over all work tiles.
template <int D>
__device__ __forceinline__ void put_scales(const AttentionParams& p, uint8_t* smem, int tile, int key, int id,
                                           int slot, int head) {
  using S = AttentionShape<D>;
  float of_key = 0.f, raised = 0.f;
  if (id >= 0) {
    of_key = p.k_scale[id * p.k_scale_block + slot * p.k_scale_slot + head * p.k_scale_head];
    raised = fmax_nan(
        __log2f(p.v_scale[id * p.v_scale_block + slot * p.v_scale_slot + head * p.v_scale_head]), -126.f);
  }
  const int at = (tile & 3) * S::kKeys + key;
  reinterpret_cast<float2*>(smem + S::kKeyScales)[at] = make_float2(of_key, raised);
  reinterpret_cast<float*>(smem + S::kKeyScales + 4 * S::kKeys * 8)[at] = exp2_approx(-raised);
}

// As produce_boxes, for page sizes that are no multiple of a TMA box, and, if CODES, for caches of e4m3 codes, which
// are converted to fp16. By the whole warpgroup, a quarter of a tile per warp; the first one is the scheduler warp.
template <int D, bool CODES>
__device__ __forceinline__ void produce_rows(const AttentionParams& p, const CUtensorMap& q_map,
                                             uint8_t* smem, uint32_t base) {
  using S = AttentionShape<D>;
  constexpr int kItem = CODES ? 1 : 2;
  const FlashBars<S> bars{base + S::kBars};
  const int warp = threadIdx.x >> 5 & 3, lane = threadIdx.x & 31;
  TileScheduler<S> scheduler(p, smem, warp == 0);
  int tile = 0;
  Work work{};
  for (uint32_t q_parity = 1;; q_parity ^= 1) {
    if (warp == 0) {
      scheduler.next(p, smem, work);
      if (lane == 0) put_work(smem + S::kWork + 48, work);
    }
    bar_sync(kBarCopying, 128);
    work = get_work(smem + S::kWork + 48);
    bar_sync(kBarCopying, 128);
    const int low = p.window > 0 ? work.position - p.window + 1 : 0;
    const char* k = static_cast<const char*>(p.k) + work.head * p.k_head * kItem;
    const char* v = static_cast<const char*>(p.v) + work.head * p.v_head * kItem;
    const int* row = p.table + work.seq * p.table_row;
    int n = work.first + work.count - 1;
    int slot, next_slot = 0;
    const auto page_of = [&](int of) {
      const int key = of * S::kKeys + warp * 32 + lane, page = quotient(key, p.page, p.by_page);
      next_slot = key - page * p.page;
      return key < work.end && key >= low ? row[page] : -1;
    };
    int id = -1, next_id = work.count > 0 ? page_of(n) : -1;
    slot = 0;
#pragma unroll 1
    for (int i = 0; i <= work.count; ++i) {
      const int old_id = id, old_slot = slot;
      id = next_id, slot = next_slot;
      if (i + 1 < work.count) next_id = page_of(--n);
      if (i < work.count) {
        const int t = tile + i;
        mbar_wait(bars.k_empty(t), FlashBars<S>::parity(t) ^ 1);
        copy_rows<D, CODES>(p.head_dim, k, p.k_block * kItem, p.k_slot * kItem, id, slot, warp * 32,
                            base + S::kK + (t % S::kStages) * S::kTile);
        if constexpr (!CODES) cp_async_mbar_arrive(bars.k_full(t));
      }
      if constexpr (CODES) cp_async_commit();
      if (i == 0) {
        mbar_wait(bars.q_empty(), q_parity);
        if (warp == 0 && lane == 0) load_q<S>(p, q_map, smem, base, bars, work, q_parity ^ 1);
        __syncwarp();
      } else {
        const int t = tile + i - 1;
        mbar_wait(bars.v_empty(t), FlashBars<S>::parity(t) ^ 1);
        copy_rows<D, CODES>(p.head_dim, v, p.v_block * kItem, p.v_slot * kItem, old_id, old_slot, warp * 32,
                            base + S::kV + (t % S::kStages) * S::kTile);
        if constexpr (!CODES) cp_async_mbar_arrive(bars.v_full(t));
      }
      if constexpr (!CODES) continue;
      cp_async_commit();
      if (i < work.count) {
        const int t = tile + i;
        if (p.by_token) put_scales<D>(p, smem, t, warp * 32 + lane, id, slot, work.head);
        cp_async_wait<1>();
        convert_codes<D>(warp * 32, base + S::kK + (t % S::kStages) * S::kTile);
        fence_proxy_async();
        mbar_arrive(bars.k_full(t));
      }
      if (i > 0) {
        const int t = tile + i - 1;
        cp_async_wait<0>();
        convert_codes<D>(warp * 32, base + S::kV + (t % S::kStages) * S::kTile);
        fence_proxy_async();
        mbar_arrive(bars.v_full(t));
      }
    }
    tile += work.count;
    if (work.rows == 0) break;
    if (warp == 0) scheduler.fetch_after(p, work);
  }
}

// Converts 64 rows of Q to fp16 in place, and stores the factor of each row that log2-scales its scores. By a
// warpgroup.
template <int D>
__device__ __forceinline__ void convert_queries(const AttentionParams& p, uint8_t* smem, int row0,
                                                float k_scale) {
  using S = AttentionShape<D>;
  constexpr int kChunks = D / 16;  // 16-byte chunks of a thread: half a row
  const int tid = threadIdx.x & 127, row = row0 + tid / 2, side = tid & 1;
  uint8_t* const half = smem + row * 128 + (kChunks == 8 ? side * (S::kRows * 128) : side * (kChunks * 16));
  uint4 raw[kChunks];
  float largest = 0.f;
#pragma unroll
  for (int j = 0; j < kChunks; ++j) {
    raw[j] = reinterpret_cast<const uint4*>(half)[j ^ (row & (kChunks - 1))];
    const uint32_t words[4] = {raw[j].x, raw[j].y, raw[j].z, raw[j].w};
#pragma unroll
    for (const uint32_t word : words) {
      const float2 pair = unpacked(word, p.bf16);
      largest = fmaxf(largest, fmaxf(fabsf(pair.x), fabsf(pair.y)));
    }
  }
  largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
  const RowScale row_scale(largest);
  const float by =
      copysignf(row_scale.factor, k_scale);  // a negative scale must not reverse the order of scores
#pragma unroll
  for (int j = 0; j < kChunks; ++j) {
    uint32_t words[4] = {raw[j].x, raw[j].y, raw[j].z, raw[j].w};
#pragma unroll
    for (uint32_t& word : words) {
      const float2 pair = unpacked(word, p.bf16);
      word = packed<__half>(pair.x * by, pair.y * by);
    }
    reinterpret_cast<uint4*>(half)[j ^ (row & (kChunks - 1))] =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
  if (side == 0)
    reinterpret_cast<float*>(smem + S::kRowScales)[row] = row_scale.inverse * p.score_scale * fabsf(k_scale);
  fence_proxy_async();
}

// Log2-scales the scores of keys with scales of their own. The log2 of the scale of a key's values is added to the
// score: weights come out multiplied by it, and the largest product is 1 in fp16.
template <int D, bool CAP>
__device__ __forceinline__ void scale_scores(float (&s)[64], const uint8_t* smem, int tile, int row,
                                             const SoftCap<CAP>& cap) {
  using S = AttentionShape<D>;
  const float* const rows = reinterpret_cast<const float*>(smem + S::kRowScales) + row;
  const float by[2] = {rows[0], rows[8]};
  const float4* const keys =
      reinterpret_cast<const float4*>(smem + S::kKeyScales) + (tile & 3) * (S::kKeys / 2) + (threadIdx.x & 3);
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const float4 two = keys[j * 4];  // scale and log2 of the values' scale, of two keys
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float &first = s[j * 4 + r * 2], &second = s[j * 4 + r * 2 + 1];
      if constexpr (CAP) {
        first = cap(first * by[r] * two.x) + two.y, second = cap(second * by[r] * two.z) + two.w;
      } else {
        first = fmaf(first * by[r], two.x, two.y), second = fmaf(second * by[r], two.z, two.w);
      }
    }
  }
}

// Sums of the weights of a tile without the scales of its values.
template <int D>
__device__ __forceinline__ float2 sum_unscaled(const float (&s)[64], const uint8_t* smem, int tile) {
  using S = AttentionShape<D>;
  const float2* const keys = reinterpret_cast<const float2*>(smem + S::kKeyScales + 4 * S::kKeys * 8) +
                             (tile & 3) * (S::kKeys / 2) + (threadIdx.x & 3);
  float2 sum = make_float2(0.f, 0.f);
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const float2 two = keys[j * 4];
    sum.x = fmaf(s[j * 4], two.x, fmaf(s[j * 4 + 1], two.y, sum.x));
    sum.y = fmaf(s[j * 4 + 2], two.x, fmaf(s[j * 4 + 3], two.y, sum.y));
  }
  return sum;
}

}  // namespace gm
#endif
