// Paged attention for any batch on sm_80 over caches of e4m3 codes: the form of flash.cuh, in which codes become the type of the queries, exactly.
//
// Codes are copied into the row of shared memory that their key will have, and converted there, a row by lanes of one warp, while the step
// before is multiplied by others; so a code is converted once for all rows of a tile. Scales are applied to scores and sums: those of a key to
// its scores, and the log2 of those of its values is added to them, so that weights come out multiplied by it and the largest is 1 (as on
// Hopper, ../../sm90/_attention_codes_sm90.cuh).
#pragma once
#include "codes.cuh"
#include "flash_padded.cuh"
#include "sm80/bf16.cuh"

#ifdef __CUDACC__
namespace gm {

// Four e4m3 codes as two pairs of T.
template <typename T>
__device__ __forceinline__ uint2 code_pairs(uint32_t codes) {
  return e4m3_by_bits(codes);
}
// The fields of a code are moved to where bf16 has them; the biases differ by 120. 0x7f and 0xff, the codes of NaN, would become 480: carrying their
// field by one sets bit 11, fifteen times which is the rest of an exponent of ones, and sets it for no other code.
template <>
__device__ __forceinline__ uint2 code_pairs<__nv_bfloat16>(uint32_t codes) {
  const auto pair = [](uint32_t high_bytes) {
    const uint32_t fields = high_bytes >> 4 & 0x07f007f0u, nan = fields + 0x00100010u & 0x08000800u;
    return times_bf16(fields | nan * 15u | (high_bytes & 0x80008000u), 0x7b807b80u);  // 2^120 twice
  };
  return make_uint2(pair(__byte_perm(codes, 0, 0x1404)), pair(__byte_perm(codes, 0, 0x3424)));
}

template <typename T, int D, bool CAP, bool FEW>
struct FlashCodes : FlashPadded<T, D, false, FEW> {
  using Base = FlashPadded<T, D, false, FEW>;
  using S = FlashShape<D, FEW>;
  using Base::base, Base::lane, Base::p, Base::work, Base::smem, Base::warp, Base::kTiles, Base::kOctets;
  static constexpr int kRows = S::kKeys / S::kWarps;            // of a step, that a warp copies
  static constexpr int kLanes = D > 128 ? 16 : D > 64 ? 8 : 4;  // of a row, for 16 codes each
  static constexpr int kCopies = kRows * kLanes / 32, kAtOnce = 32 / kLanes;

  const SoftCap<CAP>& code_cap;

  __device__ __forceinline__ FlashCodes(const FlashParams& params, const SoftCap<CAP>& soft_cap,
                                        const SoftCap<false>& none, const FlashWork& of, uint8_t* memory)
      : Base(params, none, of, memory), code_cap(soft_cap) {}

  // Scales of the keys of a step, in the place of the pages that flash.cuh keeps there: of the key and log2 of that of its values; the
  // reciprocal of the latter.
  __device__ __forceinline__ float2* scales(int step) const {
    return reinterpret_cast<float2*>(smem + S::kPlaces) + (step & 1) * S::kKeys;
  }
  __device__ __forceinline__ float* inverses(int step) const {
    return reinterpret_cast<float*>(smem + S::kPlaces + 2 * S::kKeys * 8) + (step & 1) * S::kKeys;
  }
  // A number that is unknown at each call, so that what follows from it is computed again instead of kept in registers.
  static __device__ __forceinline__ int again(int value) {
    asm volatile("" : "+r"(value));
    return value;
  }

  // Pages of the keys of a step.
  __device__ __forceinline__ int* pages(int step) const {
    return reinterpret_cast<int*>(smem + S::kPlaces + 2 * S::kKeys * 12) + (step & 1) * S::kKeys;
  }
  __device__ __forceinline__ int own_row() const { return warp * kRows + this->this_lane() % kRows; }

  // Whether row `row` of a step is a key that the tile sees.
  __device__ __forceinline__ bool is_key(int step, int row) const {
    const int key = step * S::kKeys + row;
    return step < work.stop && key < work.end && (p.window <= 0 || key > work.position - p.window);
  }
  // Which page of its sequence a row of a step is in, and the slot of it.
  __device__ __forceinline__ int2 split(int step, int row) const {
    const int key = step * S::kKeys + row;
    int page = __umulhi(key, p.by_page);
    page += key - page * p.page >= p.page;
    return make_int2(page, key - page * p.page);
  }

  // Copies the page of this lane's row from the table.
  __device__ __forceinline__ void copy_pages(int step) const {
    const int row = own_row();
    if (lane < kRows && is_key(step, row))
      cp_async_4(smem_u32(pages(step) + row), p.table + again(work.seq) * p.table_row + split(step, row).x,
                 4);
  }

  // Copies the codes of keys or values of a step, each row to the start of its place.
  __device__ __forceinline__ void copy_codes(int step, int slot) const {
    const bool keys = slot == 0;
    const int lane = this->this_lane(), c = lane % kLanes;
    const char* all =
        static_cast<const char*>(keys ? p.k : p.v) + again(work.head) * (keys ? p.k_head : p.v_head);
    const int64_t block = keys ? p.k_block : p.v_block, bytes = keys ? p.k_slot : p.v_slot;
#pragma unroll
    for (int n = 0; n < kCopies; ++n) {
      const int row = warp * kRows + n * kAtOnce + lane / kLanes;
      const bool exists = is_key(step, row) && c * 16 < p.head_dim;
      if (c * 16 < D)
        cp_async_16_if(exists, base + S::kRing + slot * S::kSlot + row * S::kRow + c * 16,
                       exists ? all + pages(step)[row] * block + split(step, row).y * bytes + c * 16 : all);
    }
    cp_async_commit();
  }

  // Converts what this warp has copied.
  __device__ __forceinline__ void convert(int slot) const {
    cp_async_wait<0>();
    const int lane = this->this_lane(), c = lane % kLanes,
              odd = c >> 2 & 1;  // eight lanes store without bank conflicts
#pragma unroll
    for (int n = 0; n < kCopies; ++n) {
      const int row = warp * kRows + n * kAtOnce + lane / kLanes;
      uint8_t* const to = smem + S::kRing + slot * S::kSlot;
      uint4 codes = make_uint4(0, 0, 0, 0);
      if (c * 16 < D) codes = *reinterpret_cast<const uint4*>(to + row * S::kRow + c * 16);
      __syncwarp();  // the stores below overwrite what other lanes read
      const uint2 x = code_pairs<T>(codes.x), y = code_pairs<T>(codes.y), z = code_pairs<T>(codes.z),
                  w = code_pairs<T>(codes.w);
      const uint4 low = make_uint4(x.x, x.y, y.x, y.y), high = make_uint4(z.x, z.y, w.x, w.y);
      if (c * 16 < D) {
        *reinterpret_cast<uint4*>(to + Base::chunk_at(row, 2 * c + odd)) = odd ? high : low;
        *reinterpret_cast<uint4*>(to + Base::chunk_at(row, 2 * c + 1 - odd)) = odd ? low : high;
      }
    }
  }

  // Copies the scales of this lane's row, zeros where there is no key; with the keys of the step.
  __device__ __forceinline__ void copy_scales(int step) const {
    if (lane >= kRows) return;
    const int row = own_row(), head = again(work.head);
    const uint32_t to = smem_u32(scales(step) + row);
    const bool exists = is_key(step, row);
    const int2 at = make_int2(exists ? pages(step)[row] : 0, split(step, row).y);
    cp_async_4(to,
               exists ? p.k_scale + at.x * p.k_scale_block + at.y * p.k_scale_slot + head * p.k_scale_head
                      : p.k_scale,
               exists ? 4 : 0);
    cp_async_4(to + 4,
               exists ? p.v_scale + at.x * p.v_scale_block + at.y * p.v_scale_slot + head * p.v_scale_head
                      : p.v_scale,
               exists ? 4 : 0);
  }
  // The scales that all keys of the head share, whose values' scale is applied to the sums.
  __device__ __forceinline__ void share_scales() const {
    if (lane >= kRows) return;
    const float of_key = p.k_scale[work.head * p.k_scale_head];
#pragma unroll
    for (int i = 0; i < 2; ++i) scales(i)[own_row()] = make_float2(of_key, 0.f), inverses(i)[own_row()] = 1.f;
  }
  // Converts the scales that this lane has copied.
  __device__ __forceinline__ void convert_scales(int step) const {
    if (lane >= kRows) return;
    float2& of = scales(step)[own_row()];
    of.y = fmax_nan(__log2f(of.y), -126.f);
    inverses(step)[own_row()] = exp2_approx(-of.y);
  }

  // As `soften`, of raw scores. Weights come out multiplied by the scales of the values, the sums of weights do not.
  __device__ __forceinline__ void soften_codes(float (&s)[kTiles][kOctets][4], int step, bool whole) {
    const int key = step * S::kKeys + this->key0, pair = this->key0 / 2;
    const float4* const of_keys = reinterpret_cast<const float4*>(scales(step)) + pair + (lane & 3);
    const float2* const of_values = reinterpret_cast<const float2*>(inverses(step)) + pair;
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
      const float4 of = of_keys[n * 4];  // scale and log2 of the values' scale, of two keys
#pragma unroll
      for (int i = 0; i < kTiles; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float &first = s[i][n][r * 2], &second = s[i][n][r * 2 + 1];
          first = code_cap(first * p.score_scale * of.x) + of.y;
          second = code_cap(second * p.score_scale * of.z) + of.w;
        }
    }
    bool grown = false;
    float factor[kTiles][2];
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float before = this->m[i][r];
        float top = before;
        if (!whole) {
          // From the first key of this lane: the last one that the row sees, and the last one that is too old.
          const int last = work.position + this->query_of(this->row0 + i * 16 + lane / 4 + r * 8) - key -
                           (lane & 3) * 2,
                    old = p.window > 0 ? last - p.window : -key - 8;
#pragma unroll
          for (int n = 0; n < kOctets * 2; ++n) {
            const int at = n / 2 * 8 + n % 2;
            if (at > last || at <= old) s[i][n / 2][r * 2 + n % 2] = -INFINITY;
          }
        }
#pragma unroll
        for (int n = 0; n < kOctets; ++n) top = fmaxf(top, fmaxf(s[i][n][r * 2], s[i][n][r * 2 + 1]));
#pragma unroll
        for (int by = 1; by <= 2; by *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, by));
        const float top_or_0 = top == -INFINITY ? 0.f : top;
        factor[i][r] = top > before ? exp2_approx(before - top_or_0) : 1.f;
        grown = grown || top > before;
        this->m[i][r] = top;
        float sum = this->l[i][r] * factor[i][r];
        const int quarter = this->this_lane() & 3;  // so that the inverses are not kept in registers
#pragma unroll
        for (int n = 0; n < kOctets; ++n) {
          const float2 inverse = of_values[n * 4 + quarter];
          float &first = s[i][n][r * 2], &second = s[i][n][r * 2 + 1];
          first = exp2_approx(first - top_or_0), second = exp2_approx(second - top_or_0);
          sum = fmaf(first, inverse.x, fmaf(second, inverse.y, sum));
        }
        this->l[i][r] = sum;
      }
    if (__any_sync(0xffffffffu, grown)) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i)
#pragma unroll
        for (int n = 0; n < D / 8; ++n)
#pragma unroll
          for (int c = 0; c < 4; ++c) this->o[i][n][c] *= factor[i][c / 2];
    }
  }

  __device__ __forceinline__ void run() {
    copy_pages(work.first);
    this->copy_queries();
    cp_async_commit();
    cp_async_wait<0>();
    __syncwarp();
    if (p.by_token) copy_scales(work.first);
    copy_codes(work.first, 0);
    convert(0);
    if (p.by_token)
      convert_scales(work.first);
    else
      share_scales();
    const uint32_t keys = base + S::kRing, values = keys + S::kSlot;
#pragma unroll 1
    for (int step = work.first; step < work.stop; ++step) {
      bool whole = true;
      const bool some = this->sees(step * S::kKeys + this->key0, whole);
      float s[kTiles][kOctets][4];
      __syncthreads();  // the keys are converted, and all are done with the values before
      copy_pages(step + 1);
      copy_codes(step, 1);
      if (some) this->scores(s, keys);
      convert(1);
      __syncthreads();  // the same of the values and these keys
      if (p.by_token) copy_scales(step + 1);
      copy_codes(step + 1, 0);
      if (some) {
        soften_codes(s, step, whole);
        this->add_values(s, values);
      }
      convert(0);
      if (p.by_token) convert_scales(step + 1);
    }
    const float of_values = p.by_token ? 1.f : p.v_scale[work.head * p.v_scale_head];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int n = 0; n < D / 8; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) this->o[i][n][c] *= of_values;
    }
    this->finish_sums();
  }
};

template <typename T, int D, bool CAP>
__device__ __forceinline__ void paged_flash_codes(const FlashParams& p, const SoftCap<CAP>& cap,
                                                  uint8_t* smem) {
  FlashWork work;
  if (!find_work<D>(p, work)) return;
  const SoftCap<false> none;
  if (work.few)
    FlashCodes<T, D, CAP, true>(p, cap, none, work, smem).run();
  else
    FlashCodes<T, D, CAP, false>(p, cap, none, work, smem).run();
}

}  // namespace gm
#endif
