// Route: a warp of a cluster chooses the experts of a token, and all of them together sort the entries by expert.
//
// Every CTA has a bit for each token, in two words, of each expert. The warp of a token sets its bit in the words of its experts, in all
// CTAs. Then the number of bits of an expert is that of its entries, sums of those are the offsets, and the place of a token among the
// entries of an expert is the number of bits below its own: an order that does not depend on who comes first. An mbarrier of each CTA counts
// the bytes that it is sent, always as many, so that no warp waits for what it has sent.
#pragma once
#include "_params.h"
#include "moe/grouped_topk/_rows.cuh"

namespace gm::route {

// Of the tokens of a word, those before a token.
GM_DEVICE uint32_t before(int token, int word) {
  const int behind = token - 32 * word;
  return behind >= 32 ? 0xffffffffu : behind > 0 ? (1u << behind) - 1 : 0;
}

class Order {
 public:
  GM_DEVICE Order(const Params& p, uint64_t* memory)
      : p_(p),
        is_part_(p.local < p.choice.experts),
        received_(memory),
        bits_(reinterpret_cast<uint32_t*>(memory + 1)),
        others_(bits_ + kWords * p.local),
        sums_(reinterpret_cast<int*>(others_ + kTokens)),
        starts_(sums_ + kWarps) {}

  // By all threads of a CTA, before any CTA marks a token.
  GM_DEVICE void clear() {
    if (thread() == 0) expect_bytes(received_, 4 * int(p_.choice.rows) * (p_.choice.top_k + int(is_part_)));
    for (int i = thread(); i < kWords * p_.local + kTokens; i += kThreads) bits_[i] = 0;
  }

  // Tells all CTAs the experts of a token, of which this lane has one if it has a place. By a whole warp.
  GM_DEVICE void mark(int token, int id) {
    const bool is_place = lane() < p_.choice.top_k, is_local = is_place && has(id);
    uint32_t* const word = is_local ? bits_ + kWords * id + token / 32 : others_;
    if (is_place) send(word, is_local ? 1u << token % 32 : 0);
    if (is_part_) {  // the number of the token's experts of other ranks
      const uint32_t count = uint32_t(popcount(ballot(is_place && !is_local)));
      if (lane() == 0) send(others_ + token, count);
    }
  }

  // The places of experts, once all tokens are marked. By all threads of a CTA; the first CTA writes the offsets.
  GM_DEVICE void count() {
    wait_for_bytes(received_);
    const int each = (p_.local + kThreads - 1) / kThreads, begin = thread() * each;
    const int end = begin + each < p_.local ? begin + each : p_.local;
    int own = 0;
#pragma unroll 1
    for (int e = begin; e < end; ++e) own += entries(e, kTokens);
    int through = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int lower = int(shuffle_up(uint32_t(through), step));
      if (lane() >= step) through += lower;
    }
    if (lane() == 31) sums_[warp()] = through;
    block_sync();
    int start = through - own;
    all_ = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const int of_warp = sums_[w];
      if (w < warp()) start += of_warp;
      all_ += of_warp;
    }
    const bool writes = cluster_rank() == 0;
#pragma unroll 1
    for (int e = begin; e < end; ++e) {
      starts_[e] = start;
      if (writes) p_.offsets[e] = start;
      start += entries(e, kTokens);
    }
    if (writes && thread() == 0) p_.offsets[p_.local] = all_;
    block_sync();
  }

  // The place of this lane's entry, if it has one. By a whole warp.
  GM_DEVICE void write(int token, int id) const {
    const bool is_place = lane() < p_.choice.top_k, is_local = is_place && has(id);
    int place = is_local ? starts_[id] + entries(id, token) : 0;
    if (is_part_) {  // entries of other ranks' experts are behind, in ascending order
      const uint32_t lanes = ballot(is_place && !is_local);
      uint32_t earlier = lane() < token ? others_[lane()] : 0;
      if (lane() + 32 < token) earlier += others_[lane() + 32];
      earlier = warp_sum(earlier);
      if (!is_local) place = all_ + int(earlier) + popcount(lanes & ((1u << lane()) - 1));
    }
    if (!is_place) return;
    const int entry = token * p_.choice.top_k + lane();
    p_.permutation[place] = entry;
    p_.inverse[entry] = is_local ? place : -1;
  }

 private:
  GM_DEVICE bool has(int id) const { return uint32_t(id) < uint32_t(p_.local); }

  // The entries of an expert by tokens before one.
  GM_DEVICE int entries(int expert, int token) const {
    int sum = 0;
#pragma unroll
    for (int word = 0; word < kWords; ++word)
      sum += popcount(bits_[kWords * expert + word] & before(token, word));
    return sum;
  }

  // To every CTA of the cluster.
  GM_DEVICE void send(uint32_t* word, uint32_t bits) {
#pragma unroll
    for (int rank = 0; rank < kCtas; ++rank)
      if (rank < cluster_ranks()) set_bits(word, rank, bits, received_);
  }

  const Params& p_;
  const bool is_part_;  // whether experts are those of other ranks
  uint64_t* const received_;
  uint32_t *const bits_, *const others_;  // others_: of each token, the number of its experts of other ranks
  int *const sums_, *const starts_;
  int all_ = 0;  // entries of this rank's experts
};

// By a cluster. memory: p.words words, and a scratch for each token of a CTA.
template <typename T, int kEach>
GM_DEVICE void run(const Params& p, void* memory) {
  const int token = warp() * cluster_ranks() + cluster_rank();
  const bool has_token = token < int(p.choice.rows);
  auto* const words = static_cast<uint64_t*>(memory);
  auto* const scratch = reinterpret_cast<topk::Scratch<kEach>*>(words + p.words / 2);
  Order order(p, words);
  topk::Row<T, kEach> row(p.choice, scratch[warp()], token);
  order.clear();
  cluster_arrive();
  begin();
  if (has_token) row.run();
  cluster_wait();  // for all CTAs to have cleared their words
  if (has_token) order.mark(token, row.id());
  if (has_token) row.write();
  order.count();
  if (has_token) order.write(token, row.id());
}

}  // namespace gm::route
