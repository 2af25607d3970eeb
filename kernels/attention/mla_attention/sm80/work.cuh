// Latent attention on sm_80: shared memory of a CTA, and which rows and keys it has.
//
// A row is a (query, head) pair of a sequence, a tile 16 or 32 of them. The steps of 32 keys of all sequences, and a fixed cost for each, are
// cut into equal pieces (LeanAttention, arXiv:2405.10480), and a CTA has the rows of one tile in one piece; the tiles of a piece, which read
// the same keys, are neighbours and run at the same time. What a CTA has follows from the lengths, so a launch needs no plan, its result does
// not depend on timing, and a captured graph stays right when lengths change. Batches whose sequences differ much in their new tokens, and
// those that fill the device, have a CTA for each tile instead, and contexts stay whole.
#pragma once
#include <cstdint>

namespace gm::mla80 {

// A context that others have parts of behind the first one: first token of its sequence; row of that, rows, parts.
struct Record {
  int token, row, rows, parts;
};

struct Params {
  void* out;
  float* lse;  // [tokens, heads] or null
  const void *q, *cache;
  const int *table, *query_start, *seq_lens;
  Record* records;  // of each CTA: the context that it has the first part of; rows 0: none
  float* parts;  // two for each CTA: [rows of a tile, 512], then maximum and sum of the weights of each row
  int64_t q_token, q_head, cache_block, cache_slot, out_token, out_head;  // strides, in elements
  int64_t table_row;
  int seqs, tokens, heads, page;
  int pieces;         // 0: contexts are whole, a CTA for each tile of the batch
  int tiles;          // of a sequence, or of the batch if contexts are whole, at most
  int sequence_cost;  // fixed cost of a sequence, in steps
  int least;          // steps of a piece
  uint32_t by_page, by_heads;
  float scale_log2;
};

// TILES: of 16 rows.
template <int TILES>
struct Shape {
  static constexpr int kThreads = 256, kWarps = kThreads / 32;
  static constexpr int kRows = 16 * TILES, kKeys = 32;  // of a step
  static constexpr int kLatent = 512, kWidth = 576;     // elements of the values and of the keys
  static constexpr int kRow = kWidth * 2;               // bytes of a key, in 16-byte chunks that are swizzled
  static constexpr int kSlot = kKeys * kRow;  // the keys of a step, whose first columns are the values
  static constexpr int kSlices = 4;           // of the products of queries and keys, along their elements
  static constexpr int kProducts = kWidth / kSlices / 16;                       // of a slice
  static constexpr int kColumns = kLatent / kWarps;                             // of the values, of a warp
  static_assert(kRow % 128 == 0 && kColumns == 64 && kProducts * 128 == kRow);  // see Attend
  static constexpr int kScores = 2 * kSlot;                                     // [slices][rows][keys] floats
  static constexpr int kWeights = kScores + kSlices * kRows * kKeys * 4;
  // 82,944 bytes of one tile, of which two CTAs fit into the 164 KiB of a multiprocessor of sm_80, and 92,160 of two.
  static constexpr int kBytes = kWeights + kRows * kKeys * 2;
  static constexpr int kPart = kRows * (kLatent + 2);  // floats of a part
};

constexpr int kMergeWarps = 4;    // of a CTA that adds parts, a row each
constexpr int kSequenceCost = 3;  // what reading the queries and writing the sums takes, about

// CTAs of a launch; sets what divides the work. rows: of a tile. ctas: those that run at a time. whole: contexts are never divided.
inline int64_t plan(Params* p, int rows, int64_t max_q, int64_t max_ctx, int64_t ctas, bool whole) {
  const int64_t tokens = p->tokens, longest = max_q < tokens ? max_q : tokens;
  const int64_t tiles = (longest * p->heads + rows - 1) / rows, pieces = ctas / tiles;
  const bool alike = tiles == 1 || 2 * tokens >= p->seqs * longest;
  if (whole || pieces < 2 || !alike) {
    const int64_t all = tokens * p->heads / rows + p->seqs;
    p->pieces = 0, p->tiles = all < INT32_MAX ? int(all) : INT32_MAX;
    return all;
  }
  p->sequence_cost = p->seqs > 1 ? kSequenceCost : 0;
  const int64_t steps = p->seqs * ((max_ctx + 31) / 32 + p->sequence_cost),
                most = (steps + p->least - 1) / p->least;
  p->pieces = int(most < pieces ? most : pieces), p->tiles = int(tiles);
  return int64_t(p->pieces) * p->tiles;
}

}  // namespace gm::mla80

#ifdef __CUDACC__
#include "attention/sm90/_attention_types_sm90.cuh"

namespace gm::mla80 {

// n / d for 0 <= n < 2^31; by: 0xffffffff / d.
__device__ __forceinline__ int divided(int n, int d, uint32_t by) {
  const int q = __umulhi(n, by);  // exact or one too small
  return q + (n - q * d >= d);
}

struct Sequence {
  int token, queries, context, steps;
};

__device__ __forceinline__ Sequence sequence_at(const Params& p, int i) {
  Sequence s;
  s.token = p.query_start[i];
  s.queries = max(0, p.query_start[i + 1] - s.token);
  s.context = max(0, p.seq_lens[i]);
  s.steps = s.queries > 0 ? max(1, cdiv(s.context, Shape<1>::kKeys)) : 0;
  return s;
}

// Rows row0 .. row0 + rows of a sequence, and steps first .. stop of its keys. own: its part in the workspace, null if it has all keys.
struct Segment {
  int seq, token, row0, rows, position, end, first,
      stop;  // position: of the sequence's first query; end: keys that a row sees
  float* own;
};

// False if the sequence has no such rows.
template <int ROWS>
__device__ __forceinline__ bool set_rows(const Params& p, Segment& w, const Sequence& s, int tile) {
  w.token = s.token, w.row0 = tile * ROWS, w.rows = min(ROWS, s.queries * p.heads - w.row0);
  w.position = s.context - s.queries;
  w.end = max(0, w.position + divided(w.row0 + w.rows - 1, p.heads, p.by_heads) + 1);
  return w.rows > 0;
}

// The tile of the batch that this CTA has where contexts are whole, those with the most keys of a sequence first; false if it has none.
template <int ROWS>
__device__ __forceinline__ bool whole_segment(const Params& p, Segment& w) {
  const int tile = p.tiles - 1 - static_cast<int>(blockIdx.x);
  const auto first_of = [&](int seq) { return p.query_start[seq] * p.heads / ROWS + seq; };
  int low = 0;
  for (int high = p.seqs; high - low > 1;) {
    const int middle = (low + high) / 2;
    (first_of(middle) <= tile ? low : high) = middle;
  }
  w.seq = low, w.own = nullptr;
  const Sequence s = sequence_at(p, low);
  if (!set_rows<ROWS>(p, w, s, tile - first_of(low))) return false;
  w.first = 0, w.stop = cdiv(w.end, Shape<1>::kKeys);
  return true;
}

__device__ __forceinline__ int cost_of(const Params& p, const Sequence& s) {
  return s.steps > 0 ? s.steps + p.sequence_cost : 0;
}

// The sums of `mine` over the threads before this one and over all of them. totals: shared memory, a number for each warp.
__device__ __forceinline__ int2 sums_before(int mine, int* totals) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int sum = mine;
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, sum, by);
    if (lane >= by) sum += other;
  }
  if (lane == 31) totals[warp] = sum;
  __syncthreads();
  int before = sum - mine, all = 0;
  for (int w = 0; w < Shape<1>::kWarps; ++w) {
    if (w < warp) before += totals[w];
    all += totals[w];
  }
  return make_int2(before, all);
}

}  // namespace gm::mla80
#endif
