// Schedule of decode on Hopper, and its copies of queries, keys and values to shared memory.
#pragma once
#include <cstdint>

#include "attention/sm90/_attention_types_sm90.cuh"
#include "sm90/ptx.cuh"

namespace gm {

struct DecodeParams {
  void* out;
  float* lse;          // [tokens, heads] or null
  const float* sinks;  // [heads] or null
  const int* table;
  const int* query_start;
  const int* seq_lens;
  // Arrivals at contexts that are split over CTAs, by their first CTA; zero between launches.
  unsigned* counters;
  float* parts;  // two for each CTA: [rows, D], then maximum and sum of each row
  const void *q, *k, *v;
  int64_t q_token, q_head, k_block, k_head, v_block, v_head;  // strides, in bytes
  int64_t table_row, out_token, out_head;                     // in elements
  int k_slot, v_slot;                                         // in bytes
  int seqs, heads, kv_heads, head_dim, group, window, page, pieces;
  int sequence_cost;  // fixed cost of a sequence, in steps
  int even;  // of contexts that are about equal: pieces of each, or contexts of a piece; 0: they are cut like others
  uint32_t by_page, by_group;
  float scale_log2;
  // For caches of e4m3 codes, whose scores are log2-scaled already (scale_log2 is 1):
  const float *k_scale, *v_scale;
  // Strides of the scales in elements, 0 along dimensions that share a scale.
  int64_t k_scale_block, k_scale_slot, k_scale_head, v_scale_block, v_scale_slot, v_scale_head;
  float score_scale;
  int by_token, bf16;  // a scale per token and head; q and out are bf16, else fp16
};

// Fixed cost of a sequence for a CTA, in steps: 3 to 4 us, in which a CTA reads 8 steps of 8 KB. A multiple of the
// number of warps, so that each warp has as many steps of a context's piece.
constexpr int kSequenceCost = 8;
// Steps of a part of one of several equal contexts, at least.
constexpr int kLeastEven = 8;

// DecodeParams::even of a batch: 0 where more than a sixteenth of the pieces would be left over.
inline int even_pieces(int seqs, int pieces) {
  if (seqs == 1) return 0;
  const int each = seqs <= pieces ? pieces / seqs : (seqs + pieces - 1) / pieces;
  const int used = seqs <= pieces ? seqs * each : (seqs + each - 1) / each;
  return used * 16 >= pieces * 15 ? each : 0;
}

// D: elements of a head. N: rows, query-head pairs of a KV head, at most. BYTES: of an element of the caches. WARPS: of a CTA; with
// eight, one has as much in flight as two of four, and contexts are merged half as often.
template <int D, int N, int BYTES = 2, int WARPS = 4>
struct DecodeShape {
  static constexpr int kWarps = WARPS, kThreads = WARPS * 32;
  static constexpr int kStep = BYTES == 1 && D <= 128 ? 32 : 16;  // keys of a step
  static constexpr int kResident = D > 128 || WARPS > 4 ? 1 : 2;  // CTAs per multiprocessor
  static constexpr int kChunks = D * BYTES / 16;                  // 16-byte chunks of a row
  static constexpr int kQRow = D * 2 + 16;                        // bytes of a row of Q in shared memory
  // Rows of 16-bit elements are in columns of 128 bytes, one behind the other, or padded where they are not made of such.
  static constexpr bool kColumns = BYTES == 2 && D % 64 == 0;
  static constexpr int kRow = BYTES == 1 ? D : kColumns ? 2 * D : kQRow;  // of a key or its values
  static constexpr int kTile = kStep * kRow;                              // keys of a step, or their values
  static constexpr int kScales = BYTES == 1 ? kStep * 8 : 0;              // of its keys, then of its values
  static constexpr int kStage = 2 * kTile + kScales;
  static constexpr int kPitch = D + 4;  // of rows of sums, in floats
  static constexpr int kQ = 0, kRing = N * kQRow, kStatsBytes = kWarps * N * 8;
  // Dynamic shared memory of a CTA at most. Two steps ahead are enough; with more in flight, memory is read slower.
  static constexpr int kLimit = (kResident == 2 ? 115200 : 231424) * 5 / 8;
  static constexpr int kFittingStages = (kLimit - kRing - kStatsBytes) / (kWarps * kStage),
                       kMaxStages = D > 192 ? 3 : 5,
                       kStages = kFittingStages < kMaxStages ? kFittingStages : kMaxStages;
  static constexpr int kRingBytes = kWarps * kStages * kStage;
  // The warps' sums alias the rings.
  static constexpr int kSums = kRing, kStats = kRing + kRingBytes, kBytes = kStats + kStatsBytes;
  static_assert(kStages >= 2 && kWarps * N * kPitch * 4 <= kRingBytes);

  // Eight rows have no bank conflicts: by a swizzle (chunk_offset), or by 16 bytes of padding. Both count on tiles that begin
  // at the first bank.
  static constexpr int kSwizzleBits = kChunks % 8 == 0 ? 3 : kChunks % 4 == 0 ? 2 : kChunks % 2 == 0 ? 1 : 0;
  static_assert(kRing % 128 == 0 && kTile % 128 == 0 && kStage % 128 == 0);
};

}  // namespace gm

#ifdef __CUDACC__
namespace gm {

template <typename S>
__device__ __forceinline__ uint32_t swizzle_of(uint32_t row) {
  return S::kScales == 0 ? 0 : row >> (3 - S::kSwizzleBits) & ((1u << S::kSwizzleBits) - 1);
}
// Offset of a 16-byte chunk of a row in a tile. first: bits of the row that a loop counts; the swizzle of its other bits is
// then computed once, before the loop.
template <typename S>
__device__ __forceinline__ uint32_t chunk_offset(uint32_t row, uint32_t piece, uint32_t first = 0) {
  if constexpr (S::kColumns) return (piece >> 3) * (S::kStep * 128) + row * 128 + ((piece ^ row) & 7) * 16;
  return row * S::kRow + (piece ^ swizzle_of<S>(row - first) ^ swizzle_of<S>(first)) * 16;
}

// A sequence of decode: keys low .. context, in `steps` steps from step `first`.
struct DecodeSequence {
  int token, queries, context, low, first, steps;
};

template <int STEP>
__device__ __forceinline__ DecodeSequence decode_sequence(const DecodeParams& p, int i) {
  DecodeSequence s;
  s.token = p.query_start[i];
  s.queries = max(0, p.query_start[i + 1] - s.token);
  s.context = max(0, p.seq_lens[i]);
  s.low = p.window > 0 ? max(0, s.context - s.queries - p.window + 1) : 0;
  s.first = s.low / STEP;
  s.steps = s.queries > 0 ? max(1, (s.context + STEP - 1) / STEP - s.first) : 0;
  return s;
}

// Pages and slots of a step of STEP keys. With pages of a multiple of 16 tokens: of every 16 keys, their page and
// the slot of the first one. Otherwise of the keys lane / 4 + 8 h, page < 0 where there is no key.
template <int STEP>
struct KeyLocations {
  int page[STEP / 8], slot[STEP / 8];
};

template <int STEP>
__device__ __forceinline__ KeyLocations<STEP> locate_keys(const DecodeParams& p, const int* row,
                                                          const DecodeSequence& seq, int step, bool exists) {
  KeyLocations<STEP> locations{};
  if (!exists) return locations;
  const bool aligned = p.page % 16 == 0;
#pragma unroll
  for (int h = 0; h < STEP / 8; ++h) {
    const int key = step * STEP + (aligned ? h * 16 : h * 8 + static_cast<int>(threadIdx.x >> 2 & 7));
    int page = __umulhi(key, p.by_page);
    page += key - page * p.page >= p.page;
    locations.slot[h] = key - page * p.page;
    locations.page[h] = aligned                               ? key < seq.context ? row[page] : 0
                        : key >= seq.low && key < seq.context ? row[page]
                                                              : -1;
    if (aligned && h + 1 == STEP / 16) break;
  }
  return locations;
}

// Copies 16 rows of a page, all of them in the context.
template <typename S>
__device__ __forceinline__ void copy_whole_rows(const char* from, int64_t slot_bytes, uint32_t to) {
  constexpr int kRows = 32 / S::kChunks;
  const int lane = threadIdx.x & 31, in = lane / S::kChunks, c = lane % S::kChunks;
  from += in * slot_bytes + c * 16;
#pragma unroll S::kResident == 1 && S::kWarps == 4 && S::kScales == 0 ? 4 : 16
  for (int row = 0; row < 16; row += kRows, from += kRows * slot_bytes)
    // With 256, memory is read slower; but of codes the L2 cache then fetches the rows of the next KV head too, which another
    // CTA copies.
    cp_async_16<S::kScales == 0 ? 128 : 256>(to + chunk_offset<S>(row + in, c, row), from);
}

// Copies the keys and values of a step, with zeros where there is no key.
template <typename S>
__device__ __forceinline__ void copy_step(const DecodeParams& p, const DecodeSequence& seq, int step,
                                          const char* k, const char* v,
                                          const KeyLocations<S::kStep>& locations, uint32_t to) {
  constexpr int kChunks = S::kChunks;
  // Less for large heads, for lack of registers.
  constexpr int kUnroll = S::kResident == 1 && S::kWarps == 4 ? 2 : 16;
  const int lane = threadIdx.x & 31;
  if constexpr (32 % kChunks == 0) {
    if (p.page % 16 == 0 && step * S::kStep >= seq.low && (step + 1) * S::kStep <= seq.context) {
#pragma unroll
      for (int h = 0; h < S::kStep / 16; ++h) {
        copy_whole_rows<S>(
            k + locations.page[h] * p.k_block + static_cast<int64_t>(locations.slot[h]) * p.k_slot, p.k_slot,
            to + h * 16 * S::kRow);
        copy_whole_rows<S>(
            v + locations.page[h] * p.v_block + static_cast<int64_t>(locations.slot[h]) * p.v_slot, p.v_slot,
            to + S::kTile + h * 16 * S::kRow);
      }
      return;
    }
  }
  if (p.page % 16 == 0) {  // row by row
#pragma unroll
    for (int h = 0; h < S::kStep / 16; ++h) {
      const char* from_k =
          k + (locations.page[h] * p.k_block + static_cast<int64_t>(locations.slot[h]) * p.k_slot);
      const char* from_v =
          v + (locations.page[h] * p.v_block + static_cast<int64_t>(locations.slot[h]) * p.v_slot);
#pragma unroll kUnroll
      for (int i = 0; i < (kChunks + 1) / 2; ++i) {
        const int piece = i * 32 + lane, in = piece / kChunks, c = piece % kChunks;
        if (kChunks % 2 != 0 && in >= 16) break;
        const int row = h * 16 + in, key = step * S::kStep + row;
        const bool there = key >= seq.low && key < seq.context;
        const uint32_t at = to + chunk_offset<S>(row, c);
        cp_async_16(at, there ? from_k + static_cast<int64_t>(in) * p.k_slot + c * 16 : k, there ? 16 : 0);
        cp_async_16(at + S::kTile, there ? from_v + static_cast<int64_t>(in) * p.v_slot + c * 16 : v,
                    there ? 16 : 0);
      }
    }
    return;
  }
  const int part = lane & 3;  // four lanes copy 64 bytes of a key at a time
#pragma unroll
  for (int h = 0; h < S::kStep / 8; ++h) {
    const bool there = locations.page[h] >= 0;
    const char* from_k =
        k + (locations.page[h] * p.k_block + static_cast<int64_t>(locations.slot[h]) * p.k_slot);
    const char* from_v =
        v + (locations.page[h] * p.v_block + static_cast<int64_t>(locations.slot[h]) * p.v_slot);
#pragma unroll kUnroll
    for (int n = 0; n < kChunks; n += 4) {
      if (n + 4 > kChunks && part >= kChunks - n) break;
      const uint32_t at = to + chunk_offset<S>(lane / 4 + h * 8, n + part);
      cp_async_16(at, there ? from_k + (n + part) * 16 : k, there ? 16 : 0);
      cp_async_16(at + S::kTile, there ? from_v + (n + part) * 16 : v, there ? 16 : 0);
    }
  }
}

// Copies the scales of a step's keys and of their values, zeros where there is no key. A lane copies those of key
// lane / 4 + 8 (lane % 4).
template <typename S>
__device__ __forceinline__ void copy_scales(const DecodeParams& p, const DecodeSequence& seq, int step,
                                            int head, const KeyLocations<S::kStep>& locations, uint32_t to) {
  const int lane = threadIdx.x & 31, in = lane / 4 + lane % 4 * 8, key = step * S::kStep + in;
  if (in >= S::kStep) return;
  const bool aligned = p.page % 16 == 0;
  const int h = aligned ? in / 16 : lane % 4;
  int page = locations.page[0], slot = locations.slot[0];
#pragma unroll
  for (int i = 1; i < S::kStep / 8; ++i)
    if (h == i) page = locations.page[i], slot = locations.slot[i];
  if (aligned) slot += in % 16;
  const bool there = key >= seq.low && key < seq.context;
  cp_async_4(to + in * 4,
             p.k_scale + (there ? page * p.k_scale_block + slot * p.k_scale_slot + head * p.k_scale_head : 0),
             there ? 4 : 0);
  cp_async_4(to + S::kStep * 4 + in * 4,
             p.v_scale + (there ? page * p.v_scale_block + slot * p.v_scale_slot + head * p.v_scale_head : 0),
             there ? 4 : 0);
}

// A segment: consecutive steps of one KV head of one sequence.
struct Segment {
  DecodeSequence seq;
  int index, head, from, count;  // sequence; KV head; its steps
};

// Copies Q of a segment to shared memory, with zeros past its rows.
template <typename S, int D, int N>
__device__ __forceinline__ void copy_queries(const DecodeParams& p, uint32_t to, const Segment& segment) {
  constexpr int kChunks = D / 8;
  const int rows = min(segment.seq.queries * p.group, N);
#pragma unroll
  for (int i = 0; i < (N * kChunks + S::kThreads - 1) / S::kThreads; ++i) {
    const int piece = threadIdx.x + i * S::kThreads, row = piece / kChunks, c = piece % kChunks;
    if (row >= N) break;
    const int token = row * p.by_group >> 16, head = segment.head * p.group + row - token * p.group;
    const char* q = static_cast<const char*>(p.q);
    cp_async_16(to + row * S::kQRow + c * 16,
                row < rows ? q + (segment.seq.token + token) * p.q_token + head * p.q_head + c * 16 : q,
                row < rows ? 16 : 0);
  }
}

}  // namespace gm
#endif
