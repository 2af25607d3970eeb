// Grouped top-k of a row of logits by one warp. The meaning, ties and NaN included, is in op.py.
//
// A lane has kEach neighbouring experts, so that the lowest lane has the lowest index of equals. Choices become integers in their order.
// Each lane sorts its own once; then the largest of the lanes' first ones is taken top_k times, by reductions of 32 bits and ballots.
// Where a group is the experts of some whole lanes, its two best choices come from the sorted ones by shuffles; else from shared memory.
#pragma once
#include <utility>

#include "_params.h"

namespace gm::topk {

// Of a warp.
template <int kEach>
struct alignas(16) Scratch {
  float scores[32 * kEach];
  uint32_t keys[32 * kEach];
  uint16_t chosen[32 * kEach];
};

// Integers above 0 in the order of floats, a NaN as -inf. A sum is -0 only of two -0, and scores are not: none comes here.
GM_DEVICE uint32_t key_of(float v) {
  const uint32_t bits = bits_of(larger(v, -__builtin_inff()));
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

// The two largest of a set.
struct Best {
  uint32_t first = 0, second = 0;
  GM_DEVICE void take(uint32_t one, uint32_t two) {
    const uint32_t lower = first < one ? first : one, other = second < two ? two : second;
    first = first < one ? one : first;
    second = lower < other ? other : lower;
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

// f(width / 2), f(width / 4) ... f(1); unrolled for 8.
template <typename F>
GM_DEVICE void repeat_halves(int width, F f) {
  if (width == 8) {
    f(4), f(2), f(1);
  } else {
#pragma unroll 1
    for (int mask = width / 2; mask > 0; mask /= 2) f(mask);
  }
}

template <typename T, int kEach>
class Row {
 public:
  GM_DEVICE Row(const Params& p, Scratch<kEach>& scratch, int64_t row)
      : p_(p), scratch_(scratch), row_(row) {}

  GM_DEVICE void run() {
    load_logits();
    load_bias();
    if (p_.sigmoid)
      take_sigmoids();
    else
      take_softmax();
    keep_scores();
    take_keys();
    const bool by_lanes = p_.lanes_shift >= 0;
    if (p_.groups > 1 && !by_lanes) drop_experts();
    sort();
    if (p_.groups > 1 && by_lanes) drop_lanes();
    choose();
    write();
  }

 private:
  // Elements of a load: 16 bytes, or as many as divide kEach.
  static constexpr int kMost = 16 / int(sizeof(T)), kLoad = kEach % kMost ? kEach % kMost : kMost;
  static_assert(kEach % 4 == 0 && kEach % kLoad == 0);

  GM_DEVICE int begin() const { return lane() * kEach; }

  GM_DEVICE void load_logits() {
    const T* from = static_cast<const T*>(p_.logits) + row_ * p_.stride + begin();
    if (p_.vectors) {
      if (begin() < p_.experts) {
#pragma unroll
        for (int i = 0; i < kEach; i += kLoad) {
          float some[kLoad];
          load(some, from + i);
#pragma unroll
          for (int j = 0; j < kLoad; ++j) scores_[i + j] = some[j];
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        if (begin() + i < p_.experts) scores_[i] = load_one(from + i);
    }
  }

  GM_DEVICE void load_bias() {
#pragma unroll
    for (int i = 0; i < kEach; ++i) bias_[i] = 0.f;
    if (p_.bias == nullptr) return;
    const float* from = p_.bias + begin();
    if (p_.vectors) {
      if (begin() < p_.experts) {
#pragma unroll
        for (int i = 0; i < kEach; i += 4) {
          float some[4];
          load(some, from + i);
#pragma unroll
          for (int j = 0; j < 4; ++j) bias_[i + j] = some[j];
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        if (begin() + i < p_.experts) bias_[i] = load_one(from + i);
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
    if (is_tiny) {  // a denormal or 0
#pragma unroll
      for (int i = 0; i < kEach; ++i) scores_[i] = quotient(1.f, below[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kEach; ++i) scores_[i] = reciprocal(below[i]);
    }
  }

  // A NaN or an infinity makes the sum NaN, and with it every score.
  GM_DEVICE void take_softmax() {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (begin() + i >= p_.experts) scores_[i] = -__builtin_inff();
      const uint32_t key = key_of(scores_[i]);
      most = most < key ? key : most;
    }
    const float top = value_of(warp_max(most));
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      scores_[i] = exponential(scores_[i] - top);
      if (begin() + i < p_.experts) sum += scores_[i];
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) sum += float_of(shuffle_xor(bits_of(sum), mask));
    const float by = reciprocal(sum);
#pragma unroll
    for (int i = 0; i < kEach; ++i) scores_[i] = share(scores_[i], sum, by);
  }

  GM_DEVICE void keep_scores() {
#pragma unroll
    for (int i = 0; i < kEach; i += 4)
      keep_four(scratch_.scores + begin() + i, scores_[i], scores_[i + 1], scores_[i + 2], scores_[i + 3]);
  }

  GM_DEVICE void take_keys() {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      keys_[i] = begin() + i < p_.experts ? key_of(scores_[i] + bias_[i]) : 0;
      ids_[i] = i;
    }
  }

  // The order of a group among others: of its best choice, or with a bias of the sum of its two best ones.
  GM_DEVICE uint32_t group_key(Best best) const {
    const float one = value_of(best.first);
    return key_of(p_.bias != nullptr && p_.group_size > 1 ? one + value_of(best.second) : one);
  }

  // Whether this lane's group is kept. Lanes of a group are 1 << shift neighbours, and have its key.
  GM_DEVICE bool is_kept(uint32_t key, int shift) const {
    const int group = lane() >> shift;
    int above = 0;
    const auto compare = [&](uint32_t other, int i) {
      above += int(other > key) | (int(other == key) & int(i < group));
    };
    if (p_.groups == 8) {
      uint32_t others[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) others[i] = shuffle(key, i << shift);
#pragma unroll
      for (int i = 0; i < 8; ++i) compare(others[i], i);
    } else {
#pragma unroll 1
      for (int i = 0; i < p_.groups; ++i) compare(shuffle(key, i << shift), i);
    }
    return above < p_.kept;
  }

  // Of groups that are not kept, by lanes: their first keys become 0.
  GM_DEVICE void drop_lanes() {
    Best best{keys_[0], keys_[1]};
#pragma unroll 1
    for (int i = 0; i < p_.lanes_shift; ++i)
      best.take(shuffle_xor(best.first, 1 << i), shuffle_xor(best.second, 1 << i));
    if (!is_kept(group_key(best), p_.lanes_shift)) keys_[0] = 0;
  }

  // Of groups that are not kept, by experts: their keys become 0.
  GM_DEVICE void drop_experts() {
#pragma unroll
    for (int i = 0; i < kEach; ++i) scratch_.keys[begin() + i] = keys_[i];
    warp_sync();
    const int lanes = 1 << p_.scan_shift, group = lane() >> p_.scan_shift;
    Best best;
    if (group < p_.groups)
#pragma unroll 4
      for (int i = lane() & (lanes - 1); i < p_.group_size; i += lanes)
        best.take(scratch_.keys[group * p_.group_size + i], 0);
#pragma unroll 1
    for (int mask = 1; mask < lanes; mask *= 2)
      best.take(shuffle_xor(best.first, mask), shuffle_xor(best.second, mask));
    const uint32_t kept = ballot(is_kept(group_key(best), p_.scan_shift));
    int owner = begin() / p_.group_size, place = begin() - owner * p_.group_size;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (owner < p_.groups && !(kept >> (owner << p_.scan_shift) & 1)) keys_[i] = 0;
      if (++place == p_.group_size) ++owner, place = 0;
    }
  }

  // This lane's keys in descending order, equals by index.
  GM_DEVICE void sort() { sort(std::make_index_sequence<kNetwork<kEach>.count>()); }
  template <size_t... kSteps>
  GM_DEVICE void sort(std::index_sequence<kSteps...>) {
    (order<kNetwork<kEach>.low[kSteps], kNetwork<kEach>.high[kSteps]>(), ...);
  }
  template <int a, int b>
  GM_DEVICE void order() {
    const uint64_t one = uint64_t(keys_[a]) << 32 | uint32_t(~ids_[a]);
    const uint64_t two = uint64_t(keys_[b]) << 32 | uint32_t(~ids_[b]);
    const bool swapped = one < two;
    const uint32_t key = swapped ? keys_[a] : keys_[b];
    const int id = swapped ? ids_[a] : ids_[b];
    if (swapped) keys_[a] = keys_[b], ids_[a] = ids_[b];
    keys_[b] = key, ids_[b] = id;
  }

  GM_DEVICE void choose() {
    if (p_.top_k != kUsual || !choose_usual()) choose_any();
    warp_sync();
  }

  // The usual number of places, where the lanes' first keys differ in each step; false where some are equal. What a step waits for
  // is then the reduction of the one before, and no ballot. This lane's keys are kept.
  static constexpr int kUsual = 8;
  GM_DEVICE bool choose_usual() const {
    uint32_t keys[kEach];
    int ids[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) keys[i] = keys_[i], ids[i] = ids_[i];
    bool is_tie = false;
#pragma unroll
    for (int place = 0; place < kUsual; ++place) {
      const bool is_chosen = keys[0] == warp_max(keys[0]);
      const uint32_t chosen = ballot(is_chosen);
      is_tie |= (chosen & (chosen - 1)) != 0;
      if (is_chosen) scratch_.chosen[place] = uint16_t(begin() + ids[0]);
      pop(keys, ids, is_chosen);
    }
    return !is_tie;
  }

  GM_DEVICE void choose_any() {
    const uint32_t lower = (1u << lane()) - 1;
#pragma unroll 1
    for (int place = 0; place < p_.top_k; ++place) {
      const bool is_largest = keys_[0] == warp_max(keys_[0]);
      const uint32_t largest = ballot(is_largest);  // of all lanes: not behind a condition
      const bool is_chosen = is_largest && (largest & lower) == 0;
      if (is_chosen) scratch_.chosen[place] = uint16_t(begin() + ids_[0]);
      pop(keys_, ids_, is_chosen);
    }
  }

  GM_DEVICE static void pop(uint32_t (&keys)[kEach], int (&ids)[kEach], bool is_chosen) {
#pragma unroll
    for (int i = 0; i + 1 < kEach; ++i) {
      keys[i] = is_chosen ? keys[i + 1] : keys[i];
      ids[i] = is_chosen ? ids[i + 1] : ids[i];
    }
    keys[kEach - 1] = is_chosen ? 0 : keys[kEach - 1];
  }

  GM_DEVICE void write() const {
    const int place = lane();
    int id = 0;
    float score = 0.f, sum = 0.f;
    if (place < p_.top_k) id = scratch_.chosen[place], score = scratch_.scores[id];
    if (p_.renormalize) {
      sum = score;
#pragma unroll 1
      for (int k = place + 32; k < p_.top_k; k += 32) sum += scratch_.scores[scratch_.chosen[k]];
      repeat_halves(p_.width, [&](int mask) { sum += float_of(shuffle_xor(bits_of(sum), mask)); });
      sum += 1e-20f;
    }
    if (place < p_.top_k) write(place, id, score, sum);
#pragma unroll 1
    for (int k = place + 32; k < p_.top_k; k += 32)
      write(k, scratch_.chosen[k], scratch_.scores[scratch_.chosen[k]], sum);
  }
  GM_DEVICE void write(int place, int id, float score, float sum) const {
    const int64_t at = row_ * p_.top_k + place;
    p_.ids[at] = id;
    p_.weights[at] = (p_.renormalize ? share(score, sum, reciprocal(sum)) : score) * p_.scale;
  }

  const Params& p_;
  Scratch<kEach>& scratch_;
  const int64_t row_;
  float scores_[kEach] = {}, bias_[kEach];
  uint32_t keys_[kEach];
  int ids_[kEach];  // places among the lane's experts
};

}  // namespace gm::topk
