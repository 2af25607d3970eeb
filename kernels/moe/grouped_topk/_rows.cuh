// Grouped top-k of a row of logits by one warp. The meaning, ties and NaN included, is in op.py.
//
// A lane has kEach neighbouring experts, so that the lowest lane has the lowest index of equals. A choice becomes a tag: an integer in its
// order, whose low bits are the expert instead. Each lane sorts its tags once; then the largest of the lanes' first ones is taken top_k
// times, by reductions of 32 bits. Where two neighbours among the tags taken, or the best one that is left, differ in those low bits alone,
// they are taken again, from whole keys and with ballots, which give equals to the lowest lane.
// Where a group is the experts of some whole lanes, its two best choices come from them by shuffles; else from shared memory.
#pragma once
#include <utility>

#include "_params.h"

namespace gm::topk {

// Of a warp.
template <int kEach>
struct alignas(16) Scratch {
  float scores[32 * kEach], choices[32 * kEach];
  uint16_t chosen[32 * kEach];
};
static_assert(sizeof(Scratch<4>) == scratch_bytes(4) && sizeof(Scratch<32>) == scratch_bytes(32));

// Integers above 0 in the order of floats that are numbers, and not -0.
GM_DEVICE uint32_t key_of(float v) {
  const uint32_t bits = bits_of(v);
  return bits ^ (uint32_t(int32_t(bits) >> 31) | 0x80000000u);
}
GM_DEVICE float value_of(uint32_t key) { return float_of(key & 0x80000000u ? key ^ 0x80000000u : ~key); }

// 1 / v, rounded correctly, for v from 2^-125 to kLargest.
constexpr float kLargest = 0x1p125f;
GM_DEVICE float reciprocal(float v) {
  const float r = reciprocal_approx(v);
  return multiply_add(r, multiply_add(-v, r, 1.f), r);
}

// part / whole, with by = 1 / whole.
GM_DEVICE float share(float part, float whole, float by) {
  const float near = part * by;
  return multiply_add(multiply_add(-near, whole, part), by, near);
}

constexpr float kLowest = -__builtin_inff();
GM_DEVICE float smaller_of(float a, float b) { return a < b ? a : b; }
GM_DEVICE float larger_of(float a, float b) { return a < b ? b : a; }

// The two largest of some choices.
struct Best {
  float first = kLowest, second = kLowest;
  GM_DEVICE void take(float one) {
    second = larger_of(second, smaller_of(first, one));
    first = larger_of(first, one);
  }
  GM_DEVICE void take(float one, float two) {
    second = larger_of(smaller_of(first, one), larger_of(second, two));
    first = larger_of(first, one);
  }
};

// Batcher's odd-even merge sort of so many: pairs of places, of which the larger one goes to the lower place.
template <int kCount>
struct Network {
  int low[256] = {}, high[256] = {}, count = 0;
  constexpr Network() {
    for (int size = 1; size < kCount; size *= 2)
      for (int step = size; step > 0; step /= 2)
        for (int first = step % size; first + step < kCount; first += 2 * step)
          for (int i = first; i < first + step && i + step < kCount; ++i)
            if (i / (2 * size) == (i + step) / (2 * size)) low[count] = i, high[count++] = i + step;
  }
};
template <int kCount>
constexpr Network<kCount> kNetwork;

template <typename T, int kEach>
class Row {
 public:
  GM_DEVICE Row(const Params& p, Scratch<kEach>& scratch, int64_t row)
      : p_(p),
        scratch_(scratch),
        row_(row),
        top_k_(in_register(p.top_k)),
        groups_(in_register(p.groups)),
        lanes_shift_(in_register(p.lanes_shift)) {}

  // Chooses the experts.
  GM_DEVICE void run() {
    load_all();
    if (p_.sigmoid)
      take_sigmoids();
    else
      take_softmax();
    keep_scores();
    // A sum is -0 only of two -0, and scores are not: no choice is. A NaN is the lowest one.
#pragma unroll
    for (int i = 0; i < kEach; ++i) choices_[i] = larger(scores_[i] + choices_[i], kLowest);
    uint32_t dropped = 0;  // a bit for each of this lane's experts
    if (groups_ > 1 && lanes_shift_ >= 0) {
      bool kept;
      if (groups_ == 8 && lanes_shift_ == 2) {  // without branches, for the sake of what waits
        Best best = best_of_lane();
        merge(best, 1), merge(best, 2);
        take_tags(0);
        kept = is_kept<8>(best, 2);
      } else {
        Best best = best_of_lane();
#pragma unroll 1
        for (int i = 0; i < lanes_shift_; ++i) merge(best, 1 << i);
        take_tags(0);
        kept = is_kept(best, lanes_shift_);
      }
      dropped = kept ? 0 : kAllBits;
      tags_[0] = kept ? tags_[0] : 0;
    } else {
      if (groups_ > 1) dropped = dropped_experts();
      take_tags(dropped);
    }
    warp_sync();
    if (top_k_ > 32 || !choose()) choose_again(dropped);
  }

  // The id of this lane's place, one of the first 32.
  GM_DEVICE int id() const { return id_ - p_.first; }

  GM_DEVICE void write() const {
    if (lane() < top_k_) write(lane(), id_, score_);
    if (top_k_ > 32) {
#pragma unroll 1
      for (int k = lane() + 32; k < top_k_; k += 32)
        write(k, scratch_.chosen[k], scratch_.scores[scratch_.chosen[k]]);
    }
  }

 private:
  // Elements of a load: 16 bytes, or as many as divide kEach.
  static constexpr int kMost = 16 / int(sizeof(T)), kLoad = kEach % kMost ? kEach % kMost : kMost;
  static_assert(kEach % 4 == 0 && kEach % kLoad == 0);
  static constexpr int kUsual = 8;  // places, for which loops are unrolled
  static constexpr uint32_t kAllBits = 0xffffffffu;
  static constexpr uint32_t mask_of(int experts) {
    return experts > 1 ? mask_of((experts + 1) / 2) << 1 | 1 : 0;
  }
  static constexpr uint32_t kMask = mask_of(32 * kEach);  // the bits of an expert

  GM_DEVICE int begin() const { return lane() * kEach; }

  // What is no expert gets a choice of -inf, and has a higher index than any expert: it is never chosen.
  GM_DEVICE void load_all() {
    const T* logits = static_cast<const T*>(p_.logits) + row_ * p_.stride + begin();
    const float* bias = p_.bias + begin();
    const bool is_inside = begin() < p_.experts;
    const float fill = p_.sigmoid ? 0.f : kLowest;
#pragma unroll
    for (int i = 0; i < kEach; ++i) scores_[i] = fill, choices_[i] = is_inside ? 0.f : kLowest;
    if (p_.vectors) {
      if (is_inside) {
        load_vectors<kLoad>(scores_, logits);
        if (p_.bias != nullptr) load_vectors<4>(choices_, bias);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        choices_[i] = kLowest;
        if (begin() + i < p_.experts) {
          scores_[i] = load_one(logits + i);
          choices_[i] = p_.bias == nullptr ? 0.f : load_one(bias + i);
        }
      }
    }
  }
  template <int kCount, typename U>
  GM_DEVICE static void load_vectors(float (&to)[kEach], const U* from) {
#pragma unroll
    for (int i = 0; i < kEach; i += kCount) {
      float some[kCount];
      load(some, from + i);
#pragma unroll
      for (int j = 0; j < kCount; ++j) to[i + j] = some[j];
    }
  }

  GM_DEVICE void take_sigmoids() {
    float below[kEach];
    bool is_tiny = false;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      below[i] = 1.f + exponential(-scores_[i]);
      is_tiny |= below[i] > kLargest;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) scores_[i] = reciprocal(below[i]);
    if (is_tiny) {  // a denormal or 0
#pragma unroll
      for (int i = 0; i < kEach; ++i) scores_[i] = quotient(1.f, below[i]);
    }
  }

  // A NaN or an infinity makes the sum NaN, and with it every score.
  GM_DEVICE void take_softmax() {
    float most = kLowest;
#pragma unroll
    for (int i = 0; i < kEach; ++i) most = larger(most, scores_[i]);
    const float top = value_of(warp_max(key_of(most)));
    sum_ = 0.f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      scores_[i] = exponential(scores_[i] - top);
      sum_ += scores_[i];
    }
    sum_of_lanes();
    const float by = reciprocal(sum_);
#pragma unroll
    for (int i = 0; i < kEach; ++i) scores_[i] = share(scores_[i], sum_, by);
  }

  GM_DEVICE void keep_scores() {
#pragma unroll
    for (int i = 0; i < kEach; i += 4)
      keep_four(scratch_.scores + begin() + i, scores_[i], scores_[i + 1], scores_[i + 2], scores_[i + 3]);
  }

  // Integers in the order of choices, but for their low bits, which are the order of experts; those of experts that are dropped are 0.
  // Sorted in descending order.
  GM_DEVICE void take_tags(uint32_t dropped) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const uint32_t tag = (key_of(choices_[i]) & ~kMask) | (kMask - uint32_t(begin() + i));
      tags_[i] = dropped >> i & 1 ? 0 : tag;
    }
    sort_tags(std::make_index_sequence<kNetwork<kEach>.count>());
  }
  template <size_t... kSteps>
  GM_DEVICE void sort_tags(std::index_sequence<kSteps...>) {
    (order_tags<kNetwork<kEach>.low[kSteps], kNetwork<kEach>.high[kSteps]>(), ...);
  }
  template <int a, int b>
  GM_DEVICE void order_tags() {
    const uint32_t one = tags_[a], two = tags_[b];
    tags_[a] = one < two ? two : one;
    tags_[b] = one < two ? one : two;
  }

  // The two best choices of this lane, and of it and another one.
  GM_DEVICE Best best_of_lane() const {
    Best best;
#pragma unroll
    for (int i = 0; i < kEach; i += 2)
      best.take(larger_of(choices_[i], choices_[i + 1]), smaller_of(choices_[i], choices_[i + 1]));
    return best;
  }
  GM_DEVICE static void merge(Best& best, int mask) {
    const uint32_t one = shuffle_xor(bits_of(best.first), mask);
    best.take(float_of(one), float_of(shuffle_xor(bits_of(best.second), mask)));
  }

  // Whether this lane's group is kept. Lanes of a group are 1 << shift neighbours, and have its two best choices. Groups are ordered by
  // the best one, or with a bias by the sum of both, of which a NaN is the lowest one. kGroups: how many there are, 0 = groups_.
  template <int kGroups = 0>
  GM_DEVICE bool is_kept(const Best& best, int shift) const {
    const bool sums = p_.bias != nullptr && p_.group_size > 1;
    const float value = larger(sums ? best.first + best.second : best.first, kLowest);
    const int group = lane() >> shift;
    int above = 0;
    const auto compare = [&](float other, int i) {
      above += int(other > value) | (int(other == value) & int(i < group));
    };
    if constexpr (kGroups > 0) {
      float others[kGroups];
#pragma unroll
      for (int i = 0; i < kGroups; ++i) others[i] = float_of(shuffle(bits_of(value), i << shift));
#pragma unroll
      for (int i = 0; i < kGroups; ++i) compare(others[i], i);
    } else {
#pragma unroll 1
      for (int i = 0; i < groups_; ++i) compare(float_of(shuffle(bits_of(value), i << shift)), i);
    }
    return above < p_.kept;
  }

  // This lane's experts of groups that are not kept, where groups share lanes.
  GM_DEVICE uint32_t dropped_experts() {
#pragma unroll
    for (int i = 0; i < kEach; i += 4)
      keep_four(scratch_.choices + begin() + i, choices_[i], choices_[i + 1], choices_[i + 2],
                choices_[i + 3]);
    warp_sync();
    const int lanes = 1 << p_.scan_shift, group = lane() >> p_.scan_shift;
    Best best;
    if (group < groups_)
#pragma unroll 4
      for (int i = lane() & (lanes - 1); i < p_.group_size; i += lanes)
        best.take(scratch_.choices[group * p_.group_size + i]);
#pragma unroll 1
    for (int mask = 1; mask < lanes; mask *= 2) merge(best, mask);
    const uint32_t kept = ballot(is_kept(best, p_.scan_shift));
    int owner = begin() / p_.group_size, place = begin() - owner * p_.group_size;
    uint32_t dropped = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      dropped |= uint32_t(owner >= groups_ || !(kept >> (owner << p_.scan_shift) & 1)) << i;
      if (++place == p_.group_size) ++owner, place = 0;
    }
    return dropped;
  }

  // Takes the largest tags, the k-th one for lane k; false where they do not tell the order.
  GM_DEVICE bool choose() {
    uint32_t before = kAllBits;
    bool is_close = false;
    const auto take = [&] {
      const uint32_t tag = warp_max(tags_[0]);
      is_close |= ((tag ^ before) & ~kMask) == 0;
      before = tag;
      const bool is_own = tags_[0] == tag;
#pragma unroll
      for (int i = 0; i + 1 < kEach; ++i) tags_[i] = is_own ? tags_[i + 1] : tags_[i];
      tags_[kEach - 1] = is_own ? 0 : tags_[kEach - 1];
      return kMask - int(tag & kMask);
    };
    sum_ = 0.f;
    if (top_k_ == kUsual) {
      int ids[kUsual];
      float scores[kUsual];
#pragma unroll
      for (int place = 0; place < kUsual; ++place) ids[place] = take();
      take();  // the best one that is left is to differ, too
      // Every lane reads all of them: sums by shuffles would take longer. Not among the reductions, which would wait.
#pragma unroll
      for (int place = 0; place < kUsual; ++place) scores[place] = scratch_.scores[in_register(ids[place])];
#pragma unroll
      for (int place = 0; place < kUsual; ++place) {
        sum_ += scores[place];
        id_ = lane() == place ? ids[place] : id_;
        score_ = lane() == place ? scores[place] : score_;
      }
    } else {
#pragma unroll 1
      for (int place = 0; place < top_k_; ++place) {
        const int id = take();
        const float score = scratch_.scores[id];
        sum_ += score;
        id_ = lane() == place ? id : id_;
        score_ = lane() == place ? score : score_;
      }
      take();
    }
    return !is_close;
  }

  // Takes the largest choices exactly, into shared memory first.
  GM_DEVICE void choose_again(uint32_t dropped) {
    uint32_t keys[kEach];
    int ids[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      keys[i] = dropped >> i & 1 ? 0 : key_of(choices_[i]), ids[i] = begin() + i;
    sort_keys(keys, ids, std::make_index_sequence<kNetwork<kEach>.count>());
    const uint32_t lower = (1u << lane()) - 1;
#pragma unroll 1
    for (int place = 0; place < top_k_; ++place) {
      const bool is_largest = keys[0] == warp_max(keys[0]);
      const uint32_t largest = ballot(is_largest);  // of all lanes: not behind a condition
      const bool is_own = is_largest && (largest & lower) == 0;
      if (is_own) scratch_.chosen[place] = uint16_t(ids[0]);
#pragma unroll
      for (int i = 0; i + 1 < kEach; ++i) {
        keys[i] = is_own ? keys[i + 1] : keys[i];
        ids[i] = is_own ? ids[i + 1] : ids[i];
      }
      keys[kEach - 1] = is_own ? 0 : keys[kEach - 1];
    }
    warp_sync();
    if (lane() < top_k_) id_ = scratch_.chosen[lane()], score_ = scratch_.scores[id_];
    sum_ = lane() < top_k_ ? score_ : 0.f;
#pragma unroll 1
    for (int k = lane() + 32; k < top_k_; k += 32) sum_ += scratch_.scores[scratch_.chosen[k]];
    sum_of_lanes();
  }
  template <size_t... kSteps>
  GM_DEVICE static void sort_keys(uint32_t (&keys)[kEach], int (&ids)[kEach],
                                  std::index_sequence<kSteps...>) {
    (order_keys<kNetwork<kEach>.low[kSteps], kNetwork<kEach>.high[kSteps]>(keys, ids), ...);
  }
  // Of equal keys the lower id is first.
  template <int a, int b>
  GM_DEVICE static void order_keys(uint32_t (&keys)[kEach], int (&ids)[kEach]) {
    const uint64_t one = uint64_t(keys[a]) << 32 | uint32_t(~ids[a]);
    const uint64_t two = uint64_t(keys[b]) << 32 | uint32_t(~ids[b]);
    const bool swapped = one < two;
    const uint32_t key = swapped ? keys[a] : keys[b];
    const int id = swapped ? ids[a] : ids[b];
    if (swapped) keys[a] = keys[b], ids[a] = ids[b];
    keys[b] = key, ids[b] = id;
  }

  GM_DEVICE void sum_of_lanes() {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) sum_ += float_of(shuffle_xor(bits_of(sum_), mask));
  }

  GM_DEVICE void write(int place, int id, float score) const {
    const int64_t at = row_ * top_k_ + place;
    const float sum = sum_ + 1e-20f;
    p_.ids[at] = id - p_.first;
    p_.weights[at] = (p_.renormalize ? share(score, sum, reciprocal(sum)) : score) * p_.scale;
  }

  const Params& p_;
  Scratch<kEach>& scratch_;
  const int64_t row_;
  // In registers: from where parameters are, each would be waited for.
  const int top_k_, groups_, lanes_shift_;
  float scores_[kEach], choices_[kEach];  // choices: at first the bias
  uint32_t tags_[kEach];
  int id_ = 0;  // of this lane's place, as its score
  float score_ = 0.f, sum_;
};

}  // namespace gm::topk
