// Online softmax of _flash_cpu.h: running maxima and sums of rows, over tiles of keys and over chunks of a context.
#pragma once
#include "_flash_problem_cpu.h"

namespace gm {
namespace {

// State of the online softmax of rows: m_i is the maximum score, l_i the sum of exp(score - m_i), acc the weighted sum
// of values. `rows` is a multiple of kLanes.
struct SoftmaxState {
  float *m_i, *l_i, *acc;
  SoftmaxState(float* memory, int64_t rows) : m_i(memory), l_i(memory + rows), acc(memory + 2 * rows) {}
  static int64_t floats(int64_t rows, int64_t dv) { return rows * (2 + dv); }
  void clear(int64_t rows, int64_t dv) const {
    for (int64_t r = 0; r < rows; ++r) m_i[r] = minus_infinity(), l_i[r] = 0;
    std::memset(acc, 0, sizeof(float) * size_t(rows * dv));
  }
};

// Keys of a tile that are visible to a query of a task: low .. high. whole: keys of the tile, rounded up to vectors.
struct Visible {
  int32_t low, high;
  bool all(int64_t whole) const { return low <= 0 && high >= whole - 1; }
  // Vectors of keys of which some are visible: begin() .. end(whole).
  int64_t begin() const { return low / kLanes * kLanes; }
  int64_t end(int64_t whole) const { return min(whole, (high + kLanes) / kLanes * kLanes); }
};
inline Visible visible(const Attention& a, const Task& t, int64_t query, int64_t at) {
  const int64_t position = t.first + query, last = min(t.context - 1, position + a.ahead);
  return {a.window > 0 ? int32_t(max(0, min(position - a.window + 1 - at, kTile))) : 0,
          int32_t(max(-1, min(last - at, kTile)))};
}

// The maximum of visible scores that is -infinity, or a NaN if one of them is: comparisons passed over it, and a row without a number must
// not look like one without keys.
inline float nan_or_less(const float* p, int64_t whole, Visible seen) {
  for (int64_t i = seen.low, end = min(whole, seen.high + 1); i < end; ++i)
    if (p[i] != p[i]) return p[i];
  return minus_infinity();
}

inline float row_max(float* p, int64_t whole, Visible seen, const float* scales) {
  vf best = splat(minus_infinity());
  if (seen.all(whole) && !scales) {
    for (int64_t i = 0; i < whole; i += kLanes) best = max(best, load(p + i));
    const float most = max(best);
    return most == minus_infinity() ? nan_or_less(p, whole, seen) : most;
  }
  vi lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  for (int64_t i = seen.begin(), end = seen.end(whole); i < end; i += kLanes) {
    const vi place = lane + int32_t(i);
    const vf product = scales ? load(p + i) * load(scales + i) : load(p + i);
    const vf score = (place <= seen.high) & (place >= seen.low) ? product : splat(minus_infinity());
    store(p + i, score);
    best = max(best, score);
  }
  const float most = max(best);
  return most == minus_infinity() ? nan_or_less(p, whole, seen) : most;
}

// tanh x = 1 - 2 / (1 + e^2x) or, near 0, where that cancels, the first terms of its series.
inline vf tanh(vf x) {
  const vf square = x * x, positive = max(x, -x);
  const vf series = x * (1.0f + square * (-1.0f / 3 + square * (2.0f / 15 + square * (-17.0f / 315))));
  const vf whole = 1.0f - 2.0f / (1.0f + exp(max(splat(-20.0f), x > 20.0f ? splat(20.0f) : x) * 2.0f));
  return positive < 0.3f ? series : whole;
}

// Soft cap of the visible scores of a row; scales: of its keys, or null.
inline void cap_scores(float* p, int64_t whole, Visible seen, const float* scales, float softcap) {
  const float by = 1 / softcap;
  for (int64_t i = seen.begin(), end = seen.end(whole); i < end; i += kLanes) {
    const vf score = scales ? load(p + i) * load(scales + i) : load(p + i);
    store(p + i, tanh(score * by) * softcap);
  }
}

// Turns scores p [rows, kTile] of a tile into weights; masked keys have weight exactly 0, and a tile without visible
// keys changes nothing. alpha [rows]: rescales the sums so far. scales: of keys and values, [kv_heads, 2, kTile] or null;
// those of values are not part of l_i.
inline void softmax(const Attention& a, const Task& t, int64_t at, int64_t whole, const float* scales,
                    SoftmaxState s, float* p, float* alpha) {
  const int64_t rows = t.all_rows();
  int64_t row = 0;
  for (int64_t n = 0; n < t.kv_heads; ++n)
    for (int64_t query = 0; query < t.queries; ++query) {
      const Visible seen = visible(a, t, query, at);
      const float* of_keys = scales ? scales + n * 2 * kTile : nullptr;
      for (int64_t head = 0; head < t.heads; ++head, ++row) {
        float* scores = p + row * kTile;
        if (a.softcap > 0) cap_scores(scores, whole, seen, of_keys, a.softcap);
        alpha[row] = row_max(scores, whole, seen, a.softcap > 0 ? nullptr : of_keys);
      }
    }
  for (int64_t r = rows; r % kLanes; ++r) alpha[r] = minus_infinity();
  for (int64_t r = 0; r < rows; r += kLanes) {
    const vf m_i = load(s.m_i + r), m_tile = load(alpha + r), m_new = m_i > m_tile ? m_i : m_tile;
    store(s.m_i + r, m_new);
    store(alpha + r, m_new == m_i ? splat(1.0f) : exp(m_i - m_new));  // also where both are -infinity
  }
  row = 0;
  for (int64_t n = 0; n < t.kv_heads; ++n)
    for (int64_t query = 0; query < t.queries; ++query) {
      const Visible seen = visible(a, t, query, at);
      const int64_t begin = seen.begin(), end = seen.end(whole);
      for (int64_t head = 0; head < t.heads; ++head, ++row) {
        float* weights = p + row * kTile;
        const float m_i = s.m_i[row];
        if (m_i == minus_infinity() || begin >= end) {
          std::memset(weights, 0, sizeof(float) * size_t(whole));
          continue;
        }
        for (int64_t i = 0; i < begin; i += kLanes) store(weights + i, zero());
        vf l_tile = zero();
        for (int64_t i = begin; i < end; i += kLanes) {
          const vf weight = exp(load(weights + i) - m_i);
          store(weights + i, scales ? weight * load(scales + (n * 2 + 1) * kTile + i) : weight);
          l_tile += weight;
        }
        for (int64_t i = end; i < whole; i += kLanes) store(weights + i, zero());
        s.l_i[row] = s.l_i[row] * alpha[row] + sum(l_tile);
      }
    }
}

// Merges the state of a later part of the context into one.
inline void merge(SoftmaxState into, SoftmaxState part, int64_t rows, int64_t dv) {
  for (int64_t r = 0; r < rows; ++r) {
    if (part.m_i[r] == minus_infinity()) continue;
    float *x = into.acc + r * dv, *y = part.acc + r * dv;
    if (into.m_i[r] == minus_infinity()) {
      into.m_i[r] = part.m_i[r], into.l_i[r] = part.l_i[r];
      std::memcpy(x, y, sizeof(float) * size_t(dv));
      continue;
    }
    const float m_new = into.m_i[r] > part.m_i[r] ? into.m_i[r] : part.m_i[r];
    const float alpha = exp(into.m_i[r] - m_new), added = exp(part.m_i[r] - m_new);
    into.m_i[r] = m_new;
    into.l_i[r] = into.l_i[r] * alpha + part.l_i[r] * added;
    for (int64_t d = 0; d < dv; d += kLanes) store(x + d, load(x + d) * alpha + load(y + d) * added);
  }
}

}  // namespace
}  // namespace gm
