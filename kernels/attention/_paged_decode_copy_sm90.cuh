// The work of decode on Hopper, and the copies of queries, keys and values to shared memory.
#pragma once
#include <cstdint>

#include "_hopper_sm90.cuh"

namespace gm {

struct DecodeParams {
  void* out;
  float* lse;          // [tokens, heads] or null
  const float* sinks;  // [heads] or null
  const int* table;
  const int* query_start;
  const int* seq_lens;
  unsigned*
      counters;  // of CTAs whose last context goes on in the next piece: arrivals; zero between launches
  float* parts;  // two for each CTA: [rows, D], then maximum and sum of each row
  const void *q, *k, *v;
  int64_t q_token, q_head, k_block, k_head, v_block, v_head;  // strides, in bytes
  int64_t table_row, out_token, out_head;                     // in elements
  int k_slot, v_slot;                                         // in bytes
  int seqs, heads, kv_heads, group, window, page, pieces;
  uint32_t by_page, by_group;
  float scale_log2;
};

// D: elements of a head. N: rows, query-head pairs of a KV head, at most.
template <int D, int N>
struct DecodeShape {
  static constexpr int kThreads = 128, kWarps = kThreads / 32, kStep = 16;  // keys of a step
  static constexpr int kResident = D > 128 ? 1 : 2;                         // CTAs of a multiprocessor
  static constexpr int kRow =
      D * 2 + 16;  // bytes of a row in shared memory: eight rows are in banks of their own
  static constexpr int kTile = kStep * kRow;  // keys of a step, or their values
  static constexpr int kStages = D == 64 ? 5 : D == 192 ? 4 : 3;
  static constexpr int kPitch = D + 4;  // of rows of sums, in floats
  static constexpr int kQ = 0, kRing = N * kRow, kRingBytes = kWarps * kStages * 2 * kTile;
  // What the warps have summed up takes the place of the rings.
  static constexpr int kSums = kRing, kEnds = kRing + kRingBytes, kBytes = kEnds + kWarps * N * 8;
  static_assert(kWarps * N * kPitch * 4 <= kRingBytes);
};

}  // namespace gm

#ifdef __CUDACC__
namespace gm {

__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// A sequence as decode sees it: keys low .. end, in `steps` steps from step `first`.
struct DecodeSequence {
  int token, queries, context, low, first, steps;
};

__device__ __forceinline__ DecodeSequence decode_sequence(const DecodeParams& p, int i) {
  DecodeSequence s;
  s.token = p.query_start[i];
  s.queries = max(0, p.query_start[i + 1] - s.token);
  s.context = max(0, p.seq_lens[i]);
  s.low = p.window > 0 ? max(0, s.context - s.queries - p.window + 1) : 0;
  s.first = s.low / 16;
  s.steps = s.queries > 0 ? max(1, (s.context + 15) / 16 - s.first) : 0;
  return s;
}

// Where keys of a step are. Pages of a multiple of 16 tokens: the page of all of them, and the slot of the
// first. Others: of two keys, lane / 4 and 8 + lane / 4; page < 0 where no key is.
struct KeyPlaces {
  int page[2], slot[2];
};

__device__ __forceinline__ KeyPlaces find_keys(const DecodeParams& p, const int* row,
                                               const DecodeSequence& seq, int step, bool exists) {
  KeyPlaces places{};
  if (!exists) return places;
  const bool even = p.page % 16 == 0;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int key = step * 16 + (even ? 0 : h * 8 + static_cast<int>(threadIdx.x >> 2 & 7));
    int page = __umulhi(key, p.by_page);
    page += key - page * p.page >= p.page;
    places.slot[h] = key - page * p.page;
    places.page[h] = even || (key >= seq.low && key < seq.context) ? row[page] : -1;
    if (even) break;
  }
  return places;
}

// Copies the keys and values of a step, zeros where no key is.
template <int D>
__device__ __forceinline__ void copy_step(const DecodeParams& p, const DecodeSequence& seq, int step,
                                          const char* k, const char* v, const KeyPlaces& places,
                                          uint32_t to) {
  constexpr int kRow = D * 2 + 16, kPieces = D / 8;  // 16-byte pieces of a row
  const int lane = threadIdx.x & 31;
  if (p.page % 16 == 0) {  // a row after the other
    const char* from_k = k + (places.page[0] * p.k_block + static_cast<int64_t>(places.slot[0]) * p.k_slot);
    const char* from_v = v + (places.page[0] * p.v_block + static_cast<int64_t>(places.slot[0]) * p.v_slot);
#pragma unroll
    for (int i = 0; i < kPieces / 2; ++i) {
      const int piece = i * 32 + lane, row = piece / kPieces, c = piece % kPieces, key = step * 16 + row;
      const bool there = key >= seq.low && key < seq.context;
      const uint32_t at = to + row * kRow + c * 16;
      copy_16(at, there ? from_k + static_cast<int64_t>(row) * p.k_slot + c * 16 : k, there ? 16 : 0);
      copy_16(at + 16 * kRow, there ? from_v + static_cast<int64_t>(row) * p.v_slot + c * 16 : v,
              there ? 16 : 0);
    }
    return;
  }
  const int part = lane & 3;  // four lanes copy 64 bytes of a key at a time
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const bool there = places.page[h] >= 0;
    const char* from_k = k + (places.page[h] * p.k_block + static_cast<int64_t>(places.slot[h]) * p.k_slot);
    const char* from_v = v + (places.page[h] * p.v_block + static_cast<int64_t>(places.slot[h]) * p.v_slot);
    const uint32_t at = to + (lane / 4 + h * 8) * kRow + part * 16;
#pragma unroll
    for (int n = 0; n < kPieces; n += 4) {
      if (n + 4 > kPieces && part >= kPieces - n) break;
      copy_16(at + n * 16, there ? from_k + (n + part) * 16 : k, there ? 16 : 0);
      copy_16(at + n * 16 + 16 * kRow, there ? from_v + (n + part) * 16 : v, there ? 16 : 0);
    }
  }
}

// A stretch of steps of one KV head of one sequence.
struct Stretch {
  DecodeSequence seq;
  int index, head, from, count;  // sequence; KV head; its steps
};

// Q of a stretch to shared memory, zeros for the rows that it does not have.
template <int D, int N>
__device__ __forceinline__ void copy_queries(const DecodeParams& p, uint32_t to, const Stretch& at) {
  constexpr int kPieces = D / 8;
  const int rows = min(at.seq.queries * p.group, N);
#pragma unroll
  for (int i = 0; i < (N * kPieces + 127) / 128; ++i) {
    const int piece = threadIdx.x + i * 128, row = piece / kPieces, c = piece % kPieces;
    if (row >= N) break;
    const int token = row * p.by_group >> 16, head = at.head * p.group + row - token * p.group;
    const char* q = static_cast<const char*>(p.q);
    copy_16(to + row * (D * 2 + 16) + c * 16,
            row < rows ? q + (at.seq.token + token) * p.q_token + head * p.q_head + c * 16 : q,
            row < rows ? 16 : 0);
  }
}

}  // namespace gm
#endif
