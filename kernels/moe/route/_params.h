// What a launch of route gets, and the shared memory of its CTAs.
#pragma once
#include <cstddef>

#include "moe/grouped_topk/_params.h"

namespace gm::route {

constexpr int kTokens = 64, kCtas = 8, kWarps = 8;  // of a cluster; of a cluster; of a CTA
constexpr int kThreads = 32 * kWarps;
constexpr int kWords = kTokens / 32;  // of a bit for each token
constexpr int kMaxTopK = 32;          // a lane each

struct Params {
  topk::Params choice;
  int32_t* offsets;                // [local + 1]
  int32_t *permutation, *inverse;  // [rows * top_k]
  int local;                       // experts of this rank
  int words;                       // words_of(local)
};

// CTAs for so many tokens: few have a CTA each. Two at least: a launch of one CTA is none of a cluster, in which red.async is an illegal
// instruction.
constexpr int ctas_of(int64_t tokens) {
  int ctas = 2;
  while (ctas < kCtas && ctas < tokens) ctas *= 2;
  return ctas;
}

// Words of a CTA's shared memory, whole 16 bytes, before what its warps choose in: an mbarrier; bits of tokens of each expert of this rank;
// of each token, how many of its experts are those of other ranks; sums of warps; places of experts.
constexpr size_t words_of(size_t local) { return (2 + (kWords + 1) * local + kTokens + kWarps + 3) / 4 * 4; }

// Bytes of a CTA's shared memory, of which a warp has `each` experts in a lane.
inline size_t bytes_of(const Params& p, int ctas, int each) {
  const size_t choosing = (p.choice.rows + ctas - 1) / ctas;
  return 4 * size_t(p.words) + choosing * topk::scratch_bytes(each);
}

template <typename Call>
Params params_of(const Call& call, int bytes) {
  Params p{topk::params_of(call, bytes),
           static_cast<int32_t*>(call.expert_offsets),
           static_cast<int32_t*>(call.permutation),
           static_cast<int32_t*>(call.inverse),
           int(call.local),
           int(words_of(call.local))};
  p.choice.first = int(call.first);
  return p;
}

}  // namespace gm::route
