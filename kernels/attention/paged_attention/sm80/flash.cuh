// Paged attention for any batch on sm_80: FlashAttention-2 (Dao, arXiv:2307.08691) with the query heads of a KV head packed into the rows of
// a tile, and keys and values gathered page by page (FlashInfer, arXiv:2501.01005).
//
// S = Q K^T and O = P V by mma.sync.m16n8k16. A warp has 32 rows (16 of heads of 256 elements), so that what it reads of keys and values
// serves two products. cp.async fills a ring whose slots are the keys and the values of a step in turn: while one is multiplied the next
// ones come. Rows of shared memory are swizzled by 16-byte chunks, so that ldmatrix has no bank conflicts. A warp leaves out steps that its
// rows do not see, and rescales its sums only when a maximum has grown.
//
// A sequence of few rows, a decode in a batch with prompts, would keep one warp of four busy: there the warps divide the keys of each step,
// and long contexts are divided among CTAs, the last of which adds the parts in the order of the keys. Which, follows from bounds that the host
// knows and from the lengths, so a launch needs no plan, and a captured graph stays right when lengths change.
#pragma once
#include "attention/sm90/_attention_parts_sm90.cuh"
#include "attention/sm90/_soft_cap_sm90.cuh"
#include "flash_work.cuh"
#include "sm80/cp_async.cuh"
#include "sm90/mma.cuh"

#ifdef __CUDACC__
namespace gm {

template <typename T, int D, bool CAP, bool FEW, int KEYS = 32>
struct Flash {
  using S = FlashShape<D, FEW, KEYS>;
  static constexpr int kTiles = S::kRowTiles, kOctets = S::kWarpKeys / 8;

  const FlashParams& p;
  const SoftCap<CAP>& cap;
  const FlashWork& work;
  uint8_t* const smem;
  const uint32_t base;
  const int warp, lane, row0, key0;                       // first row of the warp; its first key of a step
  float o[kTiles][D / 8][4], m[kTiles][2], l[kTiles][2];  // maxima in units of the raw scores

  __device__ __forceinline__ Flash(const FlashParams& params, const SoftCap<CAP>& soft_cap,
                                   const FlashWork& of, uint8_t* memory)
      : p(params),
        cap(soft_cap),
        work(of),
        smem(memory),
        base(smem_u32(memory)),
        warp(threadIdx.x >> 5),
        lane(threadIdx.x & 31),
        row0(FEW ? 0 : warp * 16 * kTiles),
        key0(FEW ? warp * S::kWarpKeys : 0) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        m[i][r] = -INFINITY, l[i][r] = 0.f;
#pragma unroll
        for (int n = 0; n < D / 8; ++n) o[i][n][r] = o[i][n][r + 2] = 0.f;
      }
  }

  __device__ __forceinline__ int query_of(int row) const { return static_cast<int>(row * p.by_group >> 16); }
  static __device__ __forceinline__ uint32_t chunk_at(int row, int chunk) {
    return row * S::kRow + (chunk ^ (row & 7)) * 16;
  }

  // A number; of large heads as one that is unknown at each call, so that addresses are computed again instead of kept in registers.
  static __device__ __forceinline__ int again(int number) {
    if constexpr (D > 64) asm volatile("" : "+r"(number));
    return number;
  }
  __device__ __forceinline__ int this_lane() const { return again(lane); }

  // Address of chunk 2 j + h of a row, from that of chunk h (0 or 1): four of them, and constants, because rows are whole 128 bytes.
  static __device__ __forceinline__ uint32_t chunk_from(uint32_t first, int j) {
    return (first ^ j % 4 * 32) + j / 4 * 128;
  }

  // Page and slot of key threadIdx.x of a step; page < 0 where there is none.
  __device__ __forceinline__ int2 place(int step) const {
    const int key = step * S::kKeys + static_cast<int>(threadIdx.x);
    if (step >= work.stop || key < work.low || key >= work.end) return make_int2(-1, 0);
    int page = __umulhi(key, p.by_page);
    page += key - page * p.page >= p.page;
    return make_int2(p.table[again(work.seq) * p.table_row + page], key - page * p.page);
  }
  // Where the keys of a step are in the cache, in bytes, or their values; negative where there is none.
  __device__ __forceinline__ int64_t* places(int step, bool values) const {
    return reinterpret_cast<int64_t*>(smem + S::kPlaces) + ((step & 1) * 2 + values) * S::kKeys;
  }
  // By one thread for each key, so that the threads that copy a row have only to add. A step's place is that of the step two before it.
  __device__ __forceinline__ void put_place(int step, int2 at) const {
    constexpr int64_t kNone = -16;  // as aligned as others; nothing is read there
    places(step, false)[threadIdx.x] =
        at.x < 0 ? kNone : at.x * p.k_block + static_cast<int64_t>(at.y) * p.k_slot;
    places(step, true)[threadIdx.x] =
        at.x < 0 ? kNone : at.x * p.v_block + static_cast<int64_t>(at.y) * p.v_slot;
  }

  __device__ __forceinline__ void copy_queries() const {
    const char* q = static_cast<const char*>(p.q);
#pragma unroll 4
    for (int i = threadIdx.x; i < S::kRows * S::kChunks; i += S::kThreads) {
      const int row = i / S::kChunks, c = i % S::kChunks, query = query_of(row);
      const int64_t from = (work.token + query) * p.q_token +
                           (work.head * p.group + row - query * p.group) * p.q_head + c * 16;
      cp_async_16_if(row < work.rows, base + chunk_at(row, c), row < work.rows ? q + from : q);
    }
  }

  // Copies the keys or the values of a step to a slot of the ring, with zeros where there is no key.
  __device__ __forceinline__ void copy(bool values, int step, int slot) const {
    if (step < work.stop) {
      constexpr int kAtOnce = S::kThreads / S::kChunks;  // rows
      const unsigned thread = again(threadIdx.x), row = thread / S::kChunks, c = thread % S::kChunks;
      const char* from = static_cast<const char*>(values ? p.v : p.k) +
                         again(work.head) * (values ? p.v_head : p.k_head) + c * 16;
      const uint32_t to = base + S::kRing + slot * S::kSlot;
      const int64_t* const at = places(step, values) + row;
#pragma unroll
      for (int n = 0; n < S::kKeys / kAtOnce; ++n) {
        constexpr int kSwizzled = 8;  // rows, after which chunks are in the same order again
        const int first = n * kAtOnce;
        cp_async_16_at(to + chunk_at(row + first % kSwizzled, c) + first / kSwizzled * kSwizzled * S::kRow,
                       from, at[first]);
      }
    }
    cp_async_commit();
  }

  // Whether keys key .. key + kWarpKeys are visible to a row of this warp; `whole`: to all of them.
  __device__ __forceinline__ bool sees(int key, bool& whole) const {
    const int row0 = again(this->row0), rows = FEW ? work.rows : min(work.rows - row0, 16 * kTiles);
    if (rows <= 0) return false;
    const int first = work.position + query_of(row0), last = work.position + query_of(row0 + rows - 1),
              end = key + S::kWarpKeys;
    whole = end <= first + 1 && (p.window <= 0 || key > last - p.window);
    return key <= last && (p.window <= 0 || end > first - p.window + 1);
  }

  __device__ __forceinline__ void scores(float (&s)[kTiles][kOctets][4], uint32_t keys) const {
    const int lane = this_lane();
    const uint32_t query = base + chunk_at(row0 + (lane & 15), lane >> 4),
                   key = keys + chunk_at(key0 + (lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int n = 0; n < kOctets; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) s[i][n][c] = 0.f;
#pragma unroll
    for (int j = 0; j < D / 16; ++j) {
      uint32_t a[kTiles][4];
#pragma unroll
      for (int i = 0; i < kTiles; ++i) ldmatrix_x4(a[i], chunk_from(query, j) + i * 16 * S::kRow);
#pragma unroll
      for (int n = 0; n < kOctets; n += 2) {
        uint32_t b[4];
        ldmatrix_x4(b, chunk_from(key, j) + n * 8 * S::kRow);
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          Num<T>::mma(s[i][n], a[i], b[0], b[1]);
          Num<T>::mma(s[i][n + 1], a[i], b[2], b[3]);
        }
      }
    }
  }

  // Scores of keys from `key` on -> weights; rescales the sums where a maximum has grown.
  __device__ __forceinline__ void soften(float (&s)[kTiles][kOctets][4], int key, bool whole) {
    if constexpr (CAP) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i)
#pragma unroll
        for (int n = 0; n < kOctets; ++n)
#pragma unroll
          for (int c = 0; c < 4; ++c) s[i][n][c] = cap(s[i][n][c]);
    }
    if (!whole) {
      const int lane = this_lane();
#pragma unroll
      for (int i = 0; i < kTiles; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int position = work.position + query_of(row0 + i * 16 + lane / 4 + r * 8),
                    oldest = p.window > 0 ? position - p.window : -1;
#pragma unroll
          for (int n = 0; n < kOctets; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              const int at = key + n * 8 + (lane & 3) * 2 + c;
              if (at > position || at <= oldest) s[i][n][r * 2 + c] = -INFINITY;
            }
        }
    }
    float factor[kTiles][2];
    bool grown = false;
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float top = -INFINITY;
#pragma unroll
        for (int n = 0; n < kOctets; ++n) top = fmaxf(top, fmaxf(s[i][n][r * 2], s[i][n][r * 2 + 1]));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        const float before = m[i][r], now = fmaxf(top, before),
                    by = now == -INFINITY ? 0.f : __fmul_rn(now, p.scale_log2);
        factor[i][r] = top > before ? exp2_approx(__fmul_rn(before, p.scale_log2) - by) : 1.f;
        grown = grown || top > before;
        m[i][r] = now;
        float sum = 0.f;
#pragma unroll
        for (int n = 0; n < kOctets; ++n)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float& weight = s[i][n][r * 2 + c];
            weight = exp2_approx(fmaf(weight, p.scale_log2, -by));
            sum += weight;
          }
        l[i][r] = fmaf(l[i][r], factor[i][r], sum);
      }
    if (__any_sync(0xffffffffu, grown)) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i)
#pragma unroll
        for (int n = 0; n < D / 8; ++n)
#pragma unroll
          for (int c = 0; c < 4; ++c) o[i][n][c] *= factor[i][c / 2];
    }
  }

  __device__ __forceinline__ void add_values(const float (&s)[kTiles][kOctets][4], uint32_t values) {
    const int lane = this_lane();
    const uint32_t value = values + chunk_at(key0 + (lane & 15), lane >> 4);
#pragma unroll
    for (int j = 0; j < kOctets / 2; ++j) {
      uint32_t a[kTiles][4];
#pragma unroll
      for (int i = 0; i < kTiles; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          a[i][c] = packed<T>(s[i][j * 2 + c / 2][c % 2 * 2], s[i][j * 2 + c / 2][c % 2 * 2 + 1]);
#pragma unroll
      for (int n = 0; n < D / 8; n += 2) {
        uint32_t b[4];
        ldmatrix_x4_trans(b, chunk_from(value, n / 2) + j * 16 * S::kRow);
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          Num<T>::mma(o[i][n], a[i], b[0], b[1]);
          Num<T>::mma(o[i][n + 1], a[i], b[2], b[3]);
        }
      }
    }
  }

  // The next item of the ring has landed for all threads, and all are done with the one before.
  static __device__ __forceinline__ void turn() {
    cp_async_wait<S::kSlots - 2>();
    __syncthreads();
  }

  __device__ __forceinline__ void run() {
    // Items of the ring (keys, values, keys of the next step ...) that are on their way while one is multiplied. The places of a step are
    // stored before the barrier behind which the first copy reads them.
    constexpr int kAhead = S::kSlots - 1;
    const bool locates = threadIdx.x < S::kKeys;
    int2 next = make_int2(-1, 0);  // of the first step whose places are not in shared memory
    if (locates) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) put_place(work.first + i, place(work.first + i));
      next = place(work.first + kAhead);
    }
    copy_queries();
    __syncthreads();
    copy(false, work.first, 0);
    if constexpr (kAhead == 2) copy(true, work.first, 1);
    const uint32_t ring = base + S::kRing;
    const auto locate = [&](int step) {
      if (!locates) return;
      put_place(step, next);
      next = place(step + 1);
    };
    int slot = 0;  // of the keys
#pragma unroll 1
    for (int step = work.first; step < work.stop; ++step) {
      const int key = step * S::kKeys + key0, after = kAhead == 1 ? 1 : slot == 2 ? 0 : slot + 1;
      bool whole = true;
      const bool some = sees(key, whole);
      float s[kTiles][kOctets][4];
      turn();
      if constexpr (kAhead == 1) {
        locate(step + 1);
        copy(true, step, 1);
      } else {
        copy(false, step + 1, after == 2 ? 0 : after + 1);
      }
      if (some) scores(s, ring + slot * S::kSlot);
      turn();
      if constexpr (kAhead == 1) {
        copy(false, step + 1, 0);
      } else {
        locate(step + 2);
        copy(true, step + 1, slot);
      }
      if (some) {
        soften(s, key, whole);
        add_values(s, ring + after * S::kSlot);
      }
      if constexpr (kAhead == 2) slot = after == 2 ? 0 : after + 1;
    }
    cp_async_wait<0>();
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        l[i][r] += __shfl_xor_sync(0xffffffffu, l[i][r], 1);
        l[i][r] += __shfl_xor_sync(0xffffffffu, l[i][r], 2);
      }
    if constexpr (FEW)
      finish_few();
    else
      finish();
  }

  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = row0 + i * 16 + lane / 4 + r * 8, query = query_of(row),
                  head = work.head * p.group + row - query * p.group;
        const bool exists = row < work.rows;
        RowEpilogue epilogue(m[i][r], l[i][r], p.scale_log2);
        if (p.sinks != nullptr && exists) epilogue.add_sink(p.sinks[head]);
        const int64_t token = work.token + query;
        if (p.lse != nullptr && exists && (lane & 3) == 0) p.lse[token * p.heads + head] = epilogue.lse();
        store_row(static_cast<T*>(p.out) + token * p.out_token + head * p.out_head,
                  reinterpret_cast<const float (&)[D / 2]>(o[i]), r, epilogue.inverse(), exists, p.head_dim);
      }
  }

  // Adds the sums of the warps, and those of the parts of the context.
  __device__ __forceinline__ void finish_few() {
    constexpr int kUnitRows = S::kPartRows, kUnit = kUnitRows * (D + 2);  // floats of a part
    float* sums = reinterpret_cast<float*>(smem);
    float2* stats = reinterpret_cast<float2*>(smem + S::kStats);
    int* last = reinterpret_cast<int*>(smem + S::kLast);
    __syncthreads();  // the ring and the queries have been read
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = warp * 16 + lane / 4 + r * 8;
      if ((lane & 3) == 0) stats[row] = make_float2(m[0][r], l[0][r]);
#pragma unroll
      for (int n = 0; n < D / 8; ++n)
        *reinterpret_cast<float2*>(sums + row * S::kPitch + n * 8 + (lane & 3) * 2) =
            make_float2(o[0][n][r * 2], o[0][n][r * 2 + 1]);
    }
    __syncthreads();
    const int context = work.seq * p.kv_heads + work.head;
    const auto part_at = [&](int part) {
      return p.parts + (static_cast<int64_t>(context) * p.most_parts + part) * kUnit;
    };
#pragma unroll 1
    for (int i = threadIdx.x; i < work.rows * (D / 4); i += S::kThreads) {
      const int row = i / (D / 4), element = i % (D / 4) * 4;
      RowPart sum{make_float4(0.f, 0.f, 0.f, 0.f), -INFINITY, 0.f};
#pragma unroll
      for (int w = 0; w < S::kWarps; ++w) {
        const float2 stat = stats[w * 16 + row];
        if (stat.y == 0.f) continue;  // this warp saw no key
        RowPart part{*reinterpret_cast<const float4*>(sums + (w * 16 + row) * S::kPitch + element), stat.x,
                     stat.y};
        add_before(part, sum, p.scale_log2);
        sum = part;
      }
      if (work.parts == 1) {
        write_part<T>(p, work.token, work.head, row, element, sum);
      } else {
        float* own = part_at(work.part);
        __stcg(reinterpret_cast<float4*>(own + row * D + element), sum.o);
        if (element == 0)
          __stcg(reinterpret_cast<float2*>(own + kUnitRows * D) + row, make_float2(sum.m, sum.l));
      }
    }
    if (work.parts == 1) return;
    __syncthreads();
    if (threadIdx.x == 0) {
      unsigned* counter = p.counters + context;
      *last = atomic_inc_acq_rel(counter) + 1 == static_cast<unsigned>(work.parts);
      if (*last) *counter = 0;
    }
    __syncthreads();
    if (!*last) return;
    write_parts<T, D, 8>(
        p, work.token, work.head, work.rows, work.parts, threadIdx.x, S::kThreads, [&](int part, int row) {
          const float* from = part_at(part);
          return PartAddress{from + row * D, reinterpret_cast<const float2*>(from + kUnitRows * D) + row};
        });
  }
};

template <typename T, int D, bool CAP, int KEYS = 32>
__device__ __forceinline__ void paged_flash(const FlashParams& p, const SoftCap<CAP>& cap, uint8_t* smem) {
  FlashWork work;
  if (!find_work<D, KEYS>(p, work)) return;
  if (work.few)
    Flash<T, D, CAP, true>(p, cap, work, smem).run();
  else
    Flash<T, D, CAP, false, KEYS>(p, cap, work, smem).run();
}

}  // namespace gm
#endif
