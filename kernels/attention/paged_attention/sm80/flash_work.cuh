// Prefill, chunked prefill and mixed batches on sm_80: shared memory of a CTA, and which rows and keys it has.
#pragma once
#include "attention/paged_attention/sm90/_paged_decode_copy_sm90.cuh"

namespace gm {

struct FlashParams : DecodeParams {
  int tile_q, tiles;  // queries of a tile; tiles of the batch at most
  int most_parts;     // of the context of a sequence with few rows
};

// D: elements of a head. FEW: of a sequence with up to 16 rows (query-head pairs of a KV head), whose keys the warps divide; else they divide
// the rows. Two CTAs fit into the 100 KiB of a multiprocessor of sm_86, sm_89 and sm_120, one with heads of 256; on sm_80 two. KEYS: of a
// step, of heads of 128 elements; of 64 keys, which halve how often queries are read, two CTAs fit on sm_80 alone.
template <int D, bool FEW, int KEYS = 32>
struct FlashShape {
  static constexpr int kThreads = 128, kWarps = kThreads / 32;
  static constexpr int kRowTiles =
      FEW || D > 128 ? 1 : 2;  // of 16 rows, of a warp: keys are read once for all of them
  static constexpr int kRows = FEW ? 16 : kWarps * 16 * kRowTiles;
  static constexpr int kKeys = FEW || D <= 64 ? 64 : D == 128 ? KEYS : 32;  // of a step
  static constexpr int kWarpKeys = FEW ? 16 : kKeys;   // of a step, that a warp multiplies
  static constexpr int kSlots = D <= 64 ? 3 : 2;       // of the ring: keys of a step or their values
  static constexpr int kChunks = D / 8, kRow = D * 2;  // 16-byte chunks of a row; its bytes
  static constexpr int kSlot = kKeys * kRow, kRing = kRows * kRow;
  static_assert(kRow % 128 == 0 && kSlot % 128 == 0);     // see Flash::chunk_from
  static constexpr int kPlaces = kRing + kSlots * kSlot;  // where keys and values of two steps are
  static constexpr int kInputs = kPlaces + 2 * 2 * kKeys * 8;
  // The sums of the warps of a CTA with few rows alias everything: [warps, 16, kPitch] floats, then maximum and sum of weights.
  static constexpr int kPitch = D + 4, kStats = kWarps * 16 * kPitch * 4, kLast = kStats + kWarps * 16 * 8;
  // Rows of a sequence whose context may be divided among CTAs at most: of a partial result in the workspace.
  static constexpr int kPartRows = D > 128 ? 8 : 16;
  static constexpr int kBytes = FEW && kLast + 16 > kInputs ? kLast + 16 : kInputs;
};

template <int D, int KEYS = 32>
constexpr int kFlashBytes =
    FlashShape<D, true>::kBytes > FlashShape<D, false, KEYS>::kBytes ? FlashShape<D, true>::kBytes
                                                                     : FlashShape<D, false, KEYS>::kBytes;

constexpr int kFewRows = 16;
constexpr int kPartSteps = 8;  // steps of 64 keys of a part of a context, at least

// CTAs of a launch; sets what divides the work. rows: of a tile; ctas: those that run at a time.
inline int64_t plan_flash(FlashParams* p, int rows, int64_t tokens, int64_t ctas, int64_t max_ctx) {
  const int64_t contexts = int64_t(p->seqs) * p->kv_heads, keys = FlashShape<128, true>::kKeys;
  const int64_t fitting = 2 * ctas / contexts, wanted = (max_ctx / keys + 1) / kPartSteps;
  p->tile_q = rows / p->group, p->tiles = int(tokens / p->tile_q + p->seqs);
  p->most_parts = int(fitting < 2 || wanted < 2 ? 1 : fitting < wanted ? fitting : wanted);
  return contexts * (p->most_parts - 1) + int64_t(p->tiles) * p->kv_heads;
}

}  // namespace gm

#ifdef __CUDACC__
namespace gm {

// The query heads of a KV head for some queries of a sequence, and the steps first .. stop of its keys low .. end.
struct FlashWork {
  int seq, head, token, rows, position, low, end, first, stop, part, parts;
  bool few;
};

// The sequence of a tile: those of sequence i begin at query_start[i] / tile_q + i.
__device__ __forceinline__ int sequence_of_tile(const FlashParams& p, int tile) {
  int low = 0;
  for (int high = p.seqs; high - low > 1;) {
    const int middle = (low + high) / 2;
    (p.query_start[middle] / p.tile_q + middle <= tile ? low : high) = middle;
  }
  return low;
}

// False if a CTA has nothing to do. The first CTAs have the parts of long contexts but the first, those behind them the tiles, in each
// sequence the one with the most keys first. The KV heads of a tile, whose keys are neighbours in memory, follow each other.
template <int D, int KEYS = 32>
__device__ __forceinline__ bool find_work(const FlashParams& p, FlashWork& w) {
  const int others = p.most_parts - 1, divided = p.seqs * p.kv_heads * others;
  int at = static_cast<int>(blockIdx.x), offset = 0;
  if (at < divided) {
    w.head = at % p.kv_heads, at /= p.kv_heads;
    w.part = at % others + 1, w.seq = at / others;
  } else {
    at -= divided;
    w.head = at % p.kv_heads, w.part = 0;
    const int tile = p.tiles - 1 - at / p.kv_heads;
    w.seq = sequence_of_tile(p, tile);
    offset = (tile - (p.query_start[w.seq] / p.tile_q + w.seq)) * p.tile_q;
  }
  const int begin = p.query_start[w.seq], count = p.query_start[w.seq + 1] - begin;
  if (offset >= count) return false;
  const int queries = min(p.tile_q, count - offset), context = max(0, p.seq_lens[w.seq]);
  w.token = begin + offset, w.rows = queries * p.group, w.position = context - count + offset;
  w.low = p.window > 0 ? max(0, w.position - p.window + 1) : 0;
  w.end = max(0, w.position + queries);
  w.few = count * p.group <= kFewRows, w.parts = 1;
  const int keys = w.few ? FlashShape<D, true>::kKeys : FlashShape<D, false, KEYS>::kKeys;
  w.first = w.low / keys, w.stop = max(w.first, (w.end + keys - 1) / keys);
  if (w.few && w.rows <= FlashShape<D, true>::kPartRows) {
    const int steps = w.stop - w.first, most = max(1, min(p.most_parts, steps / kPartSteps)),
              each = max(1, (steps + most - 1) / most);
    w.parts = max(1, (steps + each - 1) / each);
    w.first += w.part * each, w.stop = min(w.stop, w.first + each);
  }
  return w.part < w.parts;
}

}  // namespace gm
#endif
