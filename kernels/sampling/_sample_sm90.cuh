// Samples one token of one row by a cluster of blocks; sample.py has the definition, docs/performance/sampling.md the
// algorithm.
//
// Every block has a slice of the row, divided by the temperature, which it keeps in shared memory, or reads again in
// every pass (from the L2 cache): then shared memory does not limit the occupancy. A pivot (value, id) separates the
// tokens that survive top_k and top_p. It is found by histograms of integers (counts, and masses in units of
// 2^-exponent), so that the result depends neither on the number of blocks nor on the order of additions.
//
// Include _cluster_sm90.cuh, or the CPU version of the tests, before this file; without either only the host's part is
// declared.
#pragma once

#include <cfloat>
#include <climits>
#include <cmath>
#include <cstdint>

struct SampleParams {
  const void* logits;  // [rows, v], rows at `stride` elements
  int64_t stride;
  const float* temperature;
  const int* top_k;
  const float* top_p;
  const float* min_p;
  const int64_t* seed;
  const int64_t* index;
  int64_t* ids;
  int v, slice;  // tokens; tokens per block of a cluster, a multiple of 4
  int exponent;  // of a unit of mass: the sum over a row fits in 62 bits
};

namespace gm {

constexpr int kBins = 1024;       // of a histogram
constexpr int kMaxListed = 1152;  // largest number of candidates that one block sorts
constexpr int kMaxRanks = 8, kMaxWarps = 16, kQueueSize = 64;
constexpr int kOffsets = 128;         // resolution of the sum of offsets within a bin
constexpr float kMaxDepth = 24.0f;    // range of the first histogram, of distances from the largest value
constexpr int kLowest = -2139095040;  // the key just above that of -inf
constexpr int kMaxSlice = 51200;      // tokens of a slice that fits in shared memory
constexpr int kMaxVocabulary = 1 << 24;
constexpr int kMaxExponent = 50;  // mass_of rounds by an addition, which has room for 51 bits

struct Shared {
  union {
    struct {
      uint32_t counts[kBins], offsets[kBins];  // of this block
    };
    uint64_t masses[kBins];
    uint64_t sorted[kMaxListed];
    uint32_t queue[kMaxWarps][kQueueSize];
  };
  union {
    struct {
      uint32_t all_counts[kBins], all_offsets[kBins];  // of the cluster
    };
    uint64_t all_masses[kBins];
    int peaks[kMaxWarps * 32];  // key of the largest value of each thread
  };
  uint64_t list[kMaxListed];  // candidates of the row, in the first block
  uint64_t scratch[2][kMaxWarps];
  int of_warps[2][kMaxWarps];
  uint64_t slots[2][kMaxRanks][2];  // of exchange, by sender
  uint64_t pivot;
  int first, last, listed, ambiguous;
  uint32_t before, through;
};

static_assert(sizeof(Shared) + 4 * kMaxSlice <= 227 * 1024);

#ifdef GM_DEVICE
constexpr float kInf = __builtin_inff();

// float32 order as int; there is no -0 among the values.
GM_DEVICE int key_of(float z) {
  const int bits = bits_of(z);
  return bits < 0 ? bits ^ 0x7fffffff : bits;
}
GM_DEVICE float value_of(int key) { return float_of(key < 0 ? key ^ 0x7fffffff : key); }
// Order of tokens: larger for larger values, and of equal values for lower ids.
GM_DEVICE uint64_t sort_key(int key, int id) {
  return uint64_t(uint32_t(key) ^ 0x80000000u) << 32 | uint32_t(~uint32_t(id));
}
// The pivot that all tokens of a key survive.
GM_DEVICE uint64_t last_of_key(int key) { return sort_key(key, INT_MAX); }
GM_DEVICE int key_part(uint64_t order) { return int(uint32_t(order >> 32) ^ 0x80000000u); }
GM_DEVICE int id_part(uint64_t order) { return int(~uint32_t(order)); }

// e^x in units of 2^-exponent, for x <= 0; exactly 2^exponent at 0.
GM_DEVICE uint64_t mass_of(double x, int exponent) {
  if (x < -40.0) return 0;
  constexpr double kWhole = 0x1.8p52;  // added to a double, leaves the nearest integer in its low bits
  const double shifted = fma(x, 1.4426950408889634, kWhole);
  const double r = fma(shifted - kWhole, -0.69314718055994531, x);
  double q = 0x1.2880411bad1aap-22;
  q = fma(q, r, 0x1.72c72ca338df0p-19);
  q = fma(q, r, 0x1.a019c9a5652d3p-16);
  q = fma(q, r, 0x1.a019ada3609f3p-13);
  q = fma(q, r, 0x1.6c16c1738ff55p-10);
  q = fma(q, r, 0x1.1111111c478ebp-7);
  q = fma(q, r, 0x1.5555555554cb7p-5);
  q = fma(q, r, 0x1.5555555553b78p-3);
  q = fma(q, r, 0.5);
  q = fma(fma(q, r, 1.0), r, 1.0);
  const int64_t power = int32_t(uint32_t(bits_of(shifted))) + exponent;
  return bits_of(double_of(bits_of(q) + (uint64_t(power) << 52)) + kWhole) - bits_of(kWhole);
}

// Gumbel noise from Philox4x32-10 (philox.py).
struct GumbelNoise {
  uint64_t seed, index;

  GM_DEVICE void words(int id, uint32_t& w0, uint32_t& w1) const {
    uint32_t c0 = uint32_t(index), c1 = uint32_t(index >> 32), c2 = uint32_t(id), c3 = 0;
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
      const uint64_t p0 = uint64_t(c0) * 0xD2511F53u, p1 = uint64_t(c2) * 0xCD9E8D57u;
      c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
      c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
      c1 = uint32_t(p1);
      c3 = uint32_t(p0);
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    w0 = c0, w1 = c1;
  }
  GM_DEVICE double exact(int id) const {
    uint32_t w0, w1;
    words(id, w0, w1);
    const double u = (double(uint64_t(w0) << 20 | w1 >> 12) + 0.5) * 0x1p-52;
    return -log(-log(u));
  }
  // In float32, within 1e-4 of `exact` in both tails: -log(u) is computed from u below 1/2 and from c = 1 - u above, whose
  // bits are the complement of u's; near c = 0 by the series of -log(1 - c).
  GM_DEVICE float approximate(int id) const {
    uint32_t w0, w1;
    words(id, w0, w1);
    const bool high = w0 >= 0x80000000u;
    w0 = high ? ~w0 : w0, w1 = high ? ~w1 : w1;
    const float part = float(w0) * 0x1p-32f + (float(w1 >> 12) + 0.5f) * 0x1p-52f;
    const float series = part * (1.0f + part * (0.5f + part * (0.33333333f + part * 0.25f)));
    const float direct = log2_approx(high ? 1.0f - part : part) * -0.69314718f;
    return log2_approx(high && part < 0.015625f ? series : direct) * -0.69314718f;
  }
};

struct BestToken {
  double score = -double(kInf);
  int id = INT_MAX;

  GM_DEVICE void update(double other, int other_id) {
    if (other > score || (other == score && other_id < id)) score = other, id = other_id;
  }
};

struct Pair {
  uint64_t a = 0, b = 0;
};

// The sampler of a row. kCached: the slice is in shared memory, behind Shared.
template <typename T, bool kCached>
struct Row {
  const SampleParams& p;
  Shared& s;
  float4* z;  // this block's slice, if it is kept
  int tid, count, lane, warp, warps, rank, ranks;
  int first, length, vectors;  // of the slice
  int64_t row;
  int buffer = 0, slot = 0;
  int peak = INT_MIN;  // key of this thread's largest value
  float top = 0;
  int top_key = 0;
  float temperature = 1;
  float masked = -kInf;  // -inf / temperature; NaN for a temperature of inf, which is an error like +inf

  GM_DEVICE Row(const SampleParams& params, void* memory)
      : p(params),
        s(*static_cast<Shared*>(memory)),
        z(reinterpret_cast<float4*>(static_cast<char*>(memory) + sizeof(Shared))) {
    tid = thread(), count = threads(), lane = tid & 31, warp = tid >> 5, warps = count >> 5;
    rank = cluster_rank(), ranks = cluster_ranks();
    row = block() / ranks;
    first = rank * p.slice;
    length = max(0, min(p.slice, p.v - first));
    vectors = (length + 3) >> 2;
  }

  // --- reductions over the block and the cluster, by all threads ---

  GM_DEVICE int block_max(int v) {
    v = warp_max(v);
    int* of = s.of_warps[buffer ^= 1];
    if (lane == 0) of[warp] = v;
    block_sync();
    return warp_max(lane < warps ? of[lane] : INT_MIN);
  }
  GM_DEVICE uint64_t scan(uint64_t v, uint64_t& total) {  // exclusive prefix sum
    uint64_t through = v;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      const uint64_t other = shuffle_up(through, by);
      if (lane >= by) through += other;
    }
    uint64_t* of = s.scratch[buffer ^= 1];
    if (lane == 31) of[warp] = through;
    block_sync();
    uint64_t before = 0;
    total = 0;
    for (int w = 0; w < warps; ++w) {
      before += w < warp ? of[w] : 0;
      total += of[w];
    }
    return before + through - v;
  }
  GM_DEVICE uint64_t block_sum(uint64_t v) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) v += shuffle_xor(v, mask);
    uint64_t* of = s.scratch[buffer ^= 1];
    if (lane == 0) of[warp] = v;
    block_sync();
    uint64_t total = 0;
    for (int w = 0; w < warps; ++w) total += of[w];
    return total;
  }
  GM_DEVICE uint64_t block_max(uint64_t v) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
      const uint64_t other = shuffle_xor(v, mask);
      v = other > v ? other : v;
    }
    uint64_t* of = s.scratch[buffer ^= 1];
    if (lane == 0) of[warp] = v;
    block_sync();
    for (int w = 0; w < warps; ++w) v = of[w] > v ? of[w] : v;
    return v;
  }
  // All-gathers two numbers per block; also a cluster barrier.
  GM_DEVICE const uint64_t (*all_gather(uint64_t a, uint64_t b))[2] {
    slot ^= 1;
    if (tid < ranks) {
      uint64_t* to = mapa(&s.slots[slot][rank][0], tid);
      to[0] = a, to[1] = b;
    }
    cluster_sync();
    return s.slots[slot];
  }
  GM_DEVICE Pair all_reduce(uint64_t a, uint64_t b) {
    const uint64_t (*of)[2] = all_gather(a, b);
    Pair sums;
    for (int r = 0; r < ranks; ++r) sums.a += of[r][0], sums.b += of[r][1];
    return sums;
  }
  // The pivot that one block broadcasts.
  GM_DEVICE uint64_t receive_pivot() {
    cluster_sync();
    return s.pivot;
  }
  GM_DEVICE void broadcast_pivot(uint64_t pivot) {  // by one thread of the cluster, before receive_pivot
    for (int r = 0; r < ranks; ++r) *mapa(&s.pivot, r) = pivot;
  }

  // --- the row ---

  GM_DEVICE const T* logits() const { return static_cast<const T*>(p.logits) + row * p.stride + first; }
  GM_DEVICE float scaled(float x) const {
    // An infinity in one lane would make the whole warp take the division's slow path.
    float value = x == -kInf ? masked : x;
    if (temperature != 1.0f) value = x == -kInf ? masked : quotient(x == -kInf ? 1.0f : x, temperature);
    return value + 0.0f;  // -0 becomes 0
  }
  // Four values of the slice from four logits; -inf past its end.
  GM_DEVICE float4 scaled(const float4& v, int place) const {
    const int room = length - place;
    return float4{room > 0 ? scaled(v.x) : -kInf, room > 1 ? scaled(v.y) : -kInf,
                  room > 2 ? scaled(v.z) : -kInf, room > 3 ? scaled(v.w) : -kInf};
  }
  GM_DEVICE float4 load_logits(bool aligned, int i) const {
    const T* from = logits() + 4 * i;
    const int room = length - 4 * i;
    if (aligned && room >= 4) return load_four(from);
    return float4{room > 0 ? load_one(from) : -kInf, room > 1 ? load_one(from + 1) : -kInf,
                  room > 2 ? load_one(from + 2) : -kInf, room > 3 ? load_one(from + 3) : -kInf};
  }
  GM_DEVICE bool logits_aligned() const {
    return reinterpret_cast<uintptr_t>(logits()) % (4 * sizeof(T)) == 0;
  }

  // Calls f(logits, place) for four logits at a time, in increasing order per thread; -inf past the end. kAhead loads are
  // issued before the first is used.
  template <int kAhead, typename F>
  GM_DEVICE void for_each_logit(F f) const {
    const bool aligned = logits_aligned();
    for (int start = tid; start < vectors; start += kAhead * count) {
      float4 v[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) v[j] = load_logits(aligned, start + j * count);
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int i = start + j * count;
        if (i < vectors) f(v[j], 4 * i);
      }
    }
  }

  // --- the values of the slice: logits over temperature ---

  template <typename F>
  GM_DEVICE void for_each_value(F f) const {  // f(value, place in the slice)
    const auto each = [&](const float4& v, int place) {
      f(v.x, place), f(v.y, place + 1), f(v.z, place + 2), f(v.w, place + 3);
    };
    if constexpr (kCached) {
      for (int i = tid; i < vectors; i += count) each(z[i], 4 * i);
    } else {
      for_each_logit<2>([&](const float4& v, int place) { each(scaled(v, place), place); });
    }
  }
  // The same for values of threads whose largest value has a key of at least `least`. If these are few, all lanes of a
  // warp share their values. By all threads.
  template <typename F>
  GM_DEVICE void for_each_from(int least, F f) const {
    const uint32_t lanes = ballot(peak >= least);
    const int vectors_each = (vectors + count - 1) / count;
    if (popcount(lanes) * ((vectors_each + 31) / 32) >= vectors_each) {
      if (peak >= least) for_each_value(f);
      return;
    }
    for (uint32_t left = lanes; left != 0; left &= left - 1) {
      const int of = warp * 32 + popcount((left & -left) - 1);
      for (int i = of + lane * count; i < vectors; i += 32 * count) {
        const float4 v = four_at(i);
        f(v.x, 4 * i), f(v.y, 4 * i + 1), f(v.z, 4 * i + 2), f(v.w, 4 * i + 3);
      }
    }
  }
  GM_DEVICE float4 four_at(int i) const {
    if constexpr (kCached) return z[i];
    return scaled(load_logits(logits_aligned(), i), 4 * i);
  }
  GM_DEVICE float at(int place) const {
    if constexpr (kCached) return reinterpret_cast<const float*>(z)[place];
    return scaled(load_one(logits() + place));
  }
  GM_DEVICE uint64_t mass(float value) const { return mass_of(double(value) - double(top), p.exponent); }

  // The first pass over the logits: finds the thread's largest value, and stores the slice if it is cached.
  GM_DEVICE void load() {
    float largest = -kInf;
    bool wrong = false;
    for_each_logit<8>([&](const float4& v, int place) {
      const float4 value = scaled(v, place);
      for (const float one : {value.x, value.y, value.z, value.w}) {
        wrong = wrong || !(one < kInf);
        largest = fmaxf(largest, one);
      }
      if constexpr (kCached) z[place / 4] = value;
    });
    peak = wrong ? INT_MAX : key_of(largest);
  }

  // The largest logit, the first one of equal ones, in one pass.
  GM_DEVICE void greedy() {
    float largest = -kInf;
    int chosen = 0;
    bool wrong = false;
    const auto consider = [&](float x, int place) {
      wrong = wrong || !(x < kInf);
      chosen = x > largest ? place : chosen;
      largest = fmaxf(largest, x);
    };
    for_each_logit<8>([&](const float4& v, int place) {
      consider(v.x, place), consider(v.y, place + 1), consider(v.z, place + 2), consider(v.w, place + 3);
    });
    const int key = wrong ? INT_MAX : key_of(largest + 0.0f);  // -0 becomes 0
    const uint64_t own = block_max(sort_key(key, first + chosen));
    cluster_wait();  // all blocks of the cluster have started
    const uint64_t (*of)[2] = all_gather(own, 0);
    if (rank == 0 && tid == 0) {
      uint64_t best = 0;
      for (int r = 0; r < ranks; ++r) best = of[r][0] > best ? of[r][0] : best;
      const int of_best = key_part(best);
      p.ids[row] = of_best == INT_MAX || of_best < kLowest ? -1 : id_part(best);
    }
  }

  // --- the first histogram: of distances from the largest value, on a linear scale.
  // Bin 0 has the largest alone. ---

  GM_DEVICE static int bin_of(float value, float top, float scale) {
    return value == top ? 0 : 1 + int(fminf((top - value) * scale, float(kBins - 2)));
  }
  GM_DEVICE void clear() {
    for (int i = tid; i < kBins; i += count) s.counts[i] = s.offsets[i] = 0;
    block_sync();
  }
  GM_DEVICE void clear_masses() {
    for (int i = tid; i < kBins; i += count) s.masses[i] = 0;
    block_sync();
  }
  // Range of keys of the values of bins from...to, with a margin for the rounding of distances.
  GM_DEVICE void keys_between(int from, int to, float width, int& least, int& most) const {
    const double margin = double(width) * 1e-3;
    if (from > 0)
      most = min(top_key - 1, key_of(float(double(top) - (from - 1) * double(width) + margin)) + 1);
    if (to == 0) {
      least = top_key;
    } else if (to < kBins - 1) {
      least = max(least, key_of(float(double(top) - to * double(width) - margin)) - 1);
    }
  }
  // The first bin up to which there are k or more entries; kBins if there are fewer.
  GM_DEVICE int bin_of_kth(const uint32_t* counts, uint64_t k) {
    const int per = kBins / count;
    uint64_t own = 0, total;
    for (int i = 0; i < per; ++i) own += counts[tid * per + i];
    if (tid == 0) s.first = kBins;
    uint64_t before = scan(own, total);
    for (int i = 0; i < per; ++i) {
      const uint64_t through = before + counts[tid * per + i];
      if (before < k && k <= through) s.first = tid * per + i;
      before = through;
    }
    block_sync();
    const int bin = s.first;
    block_sync();
    return bin;
  }
  // All-reduces the histograms of the cluster: each block reduces a segment and broadcasts it.
  GM_DEVICE void all_reduce_counts() {
    const int share = kBins / ranks;
    for (int i = rank * share + tid; i < (rank + 1) * share; i += count) {
      uint32_t sum = 0, offsets = 0;
      for (int r = 0; r < ranks; ++r) sum += *mapa(&s.counts[i], r), offsets += *mapa(&s.offsets[i], r);
      for (int r = 0; r < ranks; ++r) *mapa(&s.all_counts[i], r) = sum, *mapa(&s.all_offsets[i], r) = offsets;
    }
    cluster_sync();
  }
  GM_DEVICE void all_reduce_masses() {
    const int share = kBins / ranks;
    for (int i = rank * share + tid; i < (rank + 1) * share; i += count) {
      uint64_t sum = 0;
      for (int r = 0; r < ranks; ++r) sum += *mapa(&s.masses[i], r);
      for (int r = 0; r < ranks; ++r) *mapa(&s.all_masses[i], r) = sum;
    }
    cluster_sync();
  }
  // Histogram of the values of keys from `least` up. weigh: also sums their offsets within the bins, and returns their
  // mass.
  GM_DEVICE uint64_t count_bins(int least, float scale, bool weigh) {
    clear();
    const float lowest = value_of(least);
    uint64_t total = 0;
    int bin = 0;
    uint32_t of_bin = 0, offsets = 0;  // neighbours in one bin are added at once
    const auto add = [&] {
      if (of_bin) atomic_add(&s.counts[bin], of_bin);
      if (offsets) atomic_add(&s.offsets[bin], offsets);
    };
    for_each_value([&](float value, int) {
      if (!(value >= lowest)) return;
      const int b = bin_of(value, top, scale);
      if (b != bin) {
        add();
        bin = b, of_bin = offsets = 0;
      }
      ++of_bin;
      if (!weigh) return;
      if (b > 0 && b < kBins - 1)
        offsets += uint32_t(((top - value) * scale - float(b - 1)) * float(kOffsets));
      if (top - value < 36.0f) total += mass(value);
    });
    add();
    return total;
  }

  // Lists the values of keys least...most in the first block, up to its capacity. Returns (their number, the count or mass
  // of those above).
  GM_DEVICE Pair gather(int least, int most, bool weigh) {
    uint64_t above = 0, found = 0;
    const float low = value_of(least);
    for_each_from(least, [&](float value, int place) {
      if (!(value >= low)) return;
      if (key_of(value) > most) {
        above += weigh ? mass(value) : 1;
        return;
      }
      ++found;
      const int at = atomic_add(mapa(&s.listed, 0), 1);
      if (at < kMaxListed) mapa(s.list, 0)[at] = sort_key(key_of(value), first + place);
    });
    found = block_sum(found);
    above = block_sum(above);
    return all_reduce(found, above);
  }

  // In the first block: the pivot among n listed candidates, after a mass of `above`: the k-th, or, of those down to the
  // k-th, the one at which the cumulative mass reaches `share` of `total` (0: of their own).
  GM_DEVICE uint64_t select_listed(int n, uint64_t k, bool by_p, double share, uint64_t total,
                                   uint64_t above) {
    uint64_t pivot = 0, all;
    for (int i = tid; i < n; i += count) {
      const uint64_t own = s.list[i];
      int place = 0;
      for (int j = 0; j < n; ++j) place += s.list[j] > own;
      s.sorted[place] = own;
    }
    block_sync();
    if (k > 0 && k <= uint64_t(n)) pivot = last_of_key(key_part(s.sorted[k - 1]));
    if (!by_p) return pivot;
    const int per = (n + count - 1) / count, begin = min(tid * per, n), end = min(begin + per, n);
    uint64_t own = 0;
    for (int i = begin; i < end; ++i)
      if (s.sorted[i] >= pivot) own += mass(value_of(key_part(s.sorted[i])));
    uint64_t through = above + scan(own, all);
    if (total == 0) total = above + all;
    const double target = share * double(total);
    if (tid == 0) s.last = n - 1;
    block_sync();
    for (int i = begin; i < end; ++i) {
      if (s.sorted[i] >= pivot) through += mass(value_of(key_part(s.sorted[i])));
      if (double(through) >= target) {
        atomic_min(&s.last, i);
        break;
      }
    }
    block_sync();
    return s.sorted[s.last] > pivot ? s.sorted[s.last] : pivot;
  }

  // The pivot among keys least...most, by exact histograms: of masses, or of tokens if `weigh` is false.
  GM_DEVICE uint64_t select_by_histograms(int least, int most, bool weigh, double target) {
    uint64_t above = 0;  // before the keys
    while (least < most) {
      int shift = 0;
      while ((uint32_t(most) - uint32_t(least)) >> shift >= unsigned(kBins)) ++shift;
      clear_masses();
      uint64_t beyond = 0, of_bin = 0;
      int bin = 0;
      if (peak >= least)
        for_each_value([&](float value, int) {
          const int key = key_of(value);
          if (key < least) return;
          const uint64_t own = weigh ? mass(value) : 1;
          if (key > most) {
            beyond += own;
            return;
          }
          const int b = int((uint32_t(most) - uint32_t(key)) >> shift);
          if (b != bin) {
            if (of_bin) atomic_add(&s.masses[bin], of_bin);
            bin = b, of_bin = 0;
          }
          of_bin += own;
        });
      if (of_bin) atomic_add(&s.masses[bin], of_bin);
      above = all_reduce(block_sum(beyond), 0).a;
      all_reduce_masses();
      const int per = kBins / count, begin = tid * per, end = begin + per;
      uint64_t own = 0, all;
      for (int i = begin; i < end; ++i) own += s.all_masses[i];
      if (tid == 0) s.first = kBins - 1;
      uint64_t through = above + scan(own, all);
      for (int i = begin; i < end; ++i) {
        through += s.all_masses[i];
        if (s.all_masses[i] > 0 && double(through) >= target) {
          atomic_min(&s.first, i);
          break;
        }
      }
      block_sync();
      const uint32_t from = uint32_t(most) - (uint32_t(s.first) << shift);
      const uint32_t to = from - ((1u << shift) - 1);
      block_sync();
      most = int(from);
      least = max(least, int(to));
    }
    return weigh ? last_equal(least, target) : last_of_key(least);
  }

  // Of tokens with one key, the one at which the cumulative mass reaches the target.
  GM_DEVICE uint64_t last_equal(int key, double target) {
    const float value = value_of(key);
    uint64_t greater = 0, equal = 0;
    if (peak >= key)
      for_each_value([&](float v, int) {
        if (v > value) greater += mass(v);
        equal += v == value;
      });
    greater = block_sum(greater);
    equal = block_sum(equal);
    const uint64_t (*of)[2] = all_gather(greater, equal);
    uint64_t above = 0, all = 0, before = 0;
    for (int r = 0; r < ranks; ++r) {
      above += of[r][0], all += of[r][1];
      if (r < rank) before += of[r][1];
    }
    const double each = fmax(double(mass(value)), 1.0);
    const double wanted = fmax(ceil((target - double(above)) / each), 1.0);
    if (wanted >= double(all)) return last_of_key(key);
    const uint64_t nth = uint64_t(wanted);
    if (nth > before && nth <= before + equal) {
      int shift = 0;
      while (length >> shift >= kBins) ++shift;
      clear();
      for_each_value([&](float v, int place) {
        if (v == value) atomic_add(&s.counts[place >> shift], 1u);
      });
      block_sync();
      const int bin = bin_of_kth(s.counts, nth - before);
      uint64_t sum = 0;
      for (int i = tid; i < bin; i += count) sum += s.counts[i];
      before += block_sum(sum);
      for (int start = bin << shift; warp == 0 && before < nth; start += 32) {
        const int place = start + lane;
        const bool same = place < length && at(place) == value;
        const uint32_t lanes = ballot(same);
        if (same && before + popcount(lanes & (0xffffffffu >> (31 - lane))) == nth)
          broadcast_pivot(sort_key(key, first + place));
        before += popcount(lanes);
      }
    }
    return receive_pivot();
  }

  // Finds the pivot among the listed candidates. The first block broadcasts it or, if the list has all survivors, samples
  // from it: then the result is 0, and the row is done.
  GM_DEVICE uint64_t finish_listed(int n, bool survivors, uint64_t k, bool by_p, double share, uint64_t total,
                                   uint64_t above) {
    if (rank == 0) {
      const uint64_t pivot = select_listed(n, k, by_p, share, total, above);
      if (survivors) draw_listed(n, pivot);
      if (!survivors && tid == 0) {
        broadcast_pivot(pivot);
        s.listed = 0;
      }
    }
    return survivors ? 0 : receive_pivot();
  }

  // The pivot of top_k; 0 if the row is done.
  GM_DEVICE uint64_t by_count(uint64_t k, bool by_p, double share) {
    const float scale = float(kBins - 2) / kMaxDepth, width = kMaxDepth / float(kBins - 2);
    // Lower bound of the k-th largest value: the k-th largest of the threads' largest values.
    clear();
    int keys[kMaxRanks];  // read at once
#pragma unroll
    for (int r = 0; r < kMaxRanks; ++r) keys[r] = r < ranks ? *mapa(&s.peaks[tid], r) : INT_MIN;
#pragma unroll
    for (int r = 0; r < kMaxRanks; ++r)
      if (keys[r] >= kLowest) atomic_add(&s.counts[bin_of(value_of(keys[r]), top, scale)], 1u);
    block_sync();
    int bin = bin_of_kth(s.counts, k), least = kLowest, most = top_key;
    if (bin == 0) return last_of_key(top_key);
    if (k <= uint64_t(kMaxListed) && bin < kBins - 1) {
      keys_between(0, bin, width, least, most);
      const Pair found = gather(least, most, false);
      if (found.a <= uint64_t(kMaxListed)) return finish_listed(int(found.a), true, k, by_p, share, 0, 0);
      if (rank == 0 && tid == 0) s.listed = 0;
    }
    count_bins(least, scale, false);
    cluster_sync();
    all_reduce_counts();
    bin = bin_of_kth(s.all_counts, k);
    if (bin == kBins) return last_of_key(kLowest);
    keys_between(bin, bin, width, least, most);
    const uint32_t candidates = s.all_counts[bin];
    if (least < most && candidates <= unsigned(kMaxListed)) {
      const Pair found = gather(least, most, false);
      if (found.a <= uint64_t(kMaxListed))
        return finish_listed(int(found.a), false, k - found.b, false, 0.0, 0, 0);
      if (rank == 0 && tid == 0) s.listed = 0;
    }
    return select_by_histograms(least, most, false, double(k));
  }

  // The pivot of top_p among the keys from `least` up; 0 if the row is done.
  GM_DEVICE uint64_t by_mass(int least, double share) {
    // All tokens below this depth have less than 1 - p of the mass together.
    const float deepest = fminf(kMaxDepth, logf(float(p.v) / fmaxf(1.0f - float(share), 1e-9f)) + 0.1f);
    const float scale = float(kBins - 2) / deepest, width = deepest / float(kBins - 2);
    int most = top_key;
    if (least == most) {
      uint64_t equal = 0;
      if (peak == top_key) for_each_value([&](float v, int) { equal += v == top; });
      equal = all_reduce(block_sum(equal), 0).a;
      return last_equal(top_key, share * double(equal << p.exponent));
    }
    const uint64_t own = block_sum(count_bins(least, scale, true));
    const uint64_t total = all_reduce(own, 0).a;
    const double target = share * double(total);
    all_reduce_counts();
    // Bounds of the cumulative mass at each bin, from the number of its tokens and their mean offset: since e^-x is convex,
    // their mass is at least that of as many tokens at the mean, and at most that of as many at the edges.
    const int per = kBins / count;
    const double margin = double(width) * 1e-3;
    uint64_t n = 0, heavy = 0, light = 0, all;
    const auto bounds = [&](int bin, uint64_t& high, uint64_t& low) {
      const uint64_t tokens = s.all_counts[bin];
      if (tokens == 0) return;
      if (bin == 0) {
        high += tokens << p.exponent, low += tokens << p.exponent;
        return;
      }
      const double edge = (bin - 1) * double(width);
      const double most_of = double(mass_of(fmin(margin - edge, 0.0), p.exponent));
      if (bin == kBins - 1) {
        high += tokens * (uint64_t(most_of) + 2);
        return;
      }
      const double place = double(s.all_offsets[bin]) / (double(tokens) * kOffsets);
      const double other = double(mass_of(margin - edge - double(width), p.exponent));
      high += tokens * (uint64_t(most_of + (other - most_of) * place) + 2);
      const uint64_t least_of =
          mass_of(-(edge + (place + 1.0 / kOffsets) * double(width) + margin), p.exponent);
      low += least_of > 2 ? tokens * (least_of - 2) : 0;
    };
    for (int i = 0; i < per; ++i) n += s.all_counts[tid * per + i], bounds(tid * per + i, heavy, light);
    if (tid == 0) s.first = s.last = kBins - 1;
    uint64_t n_before = scan(n, all), most_before = scan(heavy, all), least_before = scan(light, all);
    uint64_t through = n_before;
    for (int i = 0; i < per; ++i) {
      const int bin = tid * per + i;
      through += s.all_counts[bin];
      bounds(bin, most_before, least_before);
      if (double(most_before) >= target && s.all_counts[bin] > 0) atomic_min(&s.first, bin);
      if (double(least_before) >= target) atomic_min(&s.last, bin);
    }
    block_sync();
    through = n_before;
    for (int i = 0; i < per; ++i) {
      if (tid * per + i == s.first) s.before = uint32_t(through);
      through += s.all_counts[tid * per + i];
      if (tid * per + i == s.last) s.through = uint32_t(through);
    }
    block_sync();
    int from = min(s.first, s.last);
    const int to = s.last;
    const uint32_t down = s.through, candidates = down - min(s.before, down);
    const bool survivors = down <= unsigned(kMaxListed);
    if (survivors) from = 0;
    block_sync();
    keys_between(from, to, width, least, most);
    if (survivors || candidates <= unsigned(kMaxListed)) {
      const Pair found = gather(least, most, true);
      if (found.a <= uint64_t(kMaxListed))
        return finish_listed(int(found.a), survivors, 0, true, share, total, found.b);
      if (rank == 0 && tid == 0) s.listed = 0;
    }
    return select_by_histograms(least, most, true, target);
  }

  // --- the draw ---

  GM_DEVICE BestToken best_of_block(BestToken own) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
      const double score = double_of(shuffle_xor(bits_of(own.score), mask));
      own.update(score, int(shuffle_xor(uint64_t(uint32_t(own.id)), mask)));
    }
    buffer ^= 1;
    if (lane == 0) s.scratch[buffer][warp] = bits_of(own.score), s.of_warps[buffer][warp] = own.id;
    block_sync();
    for (int w = 0; w < warps; ++w) own.update(double_of(s.scratch[buffer][w]), s.of_warps[buffer][w]);
    return own;
  }
  // A min_p above 1 excludes every token; then the result is token 0.
  GM_DEVICE void write(const BestToken& best) const { p.ids[row] = best.id == INT_MAX ? 0 : best.id; }

  GM_DEVICE GumbelNoise noise() const { return GumbelNoise{uint64_t(p.seed[row]), uint64_t(p.index[row])}; }

  GM_DEVICE void draw_listed(int n, uint64_t pivot) {
    const GumbelNoise noise_of = noise();
    const double floor = double(p.min_p[row]);
    BestToken best;
    for (int i = tid; i < n; i += count) {
      const uint64_t own = s.sorted[i];
      if (own < pivot) continue;
      const double value = double(value_of(key_part(own)));
      if (floor > 0.0 && exp(value - double(top)) < floor) continue;
      best.update(value + noise_of.exact(id_part(own)), id_part(own));
    }
    best = best_of_block(best);
    if (tid == 0) write(best);
  }

  GM_DEVICE void draw(uint64_t pivot) {
    const GumbelNoise noise_of = noise();
    const float floor = p.min_p[row];
    const float edge = floor > 0.0f ? logf(floor) : -kInf;
    const float limit = edge - 1e-3f, surely = edge + 1e-3f;
    const float least = value_of(key_part(pivot));
    const int last = id_part(pivot);
    const auto survives = [&](float value, int id) {
      if (!(value > least || (value == least && id <= last))) return false;
      const float depth = value - top;
      return depth >= surely || (depth >= limit && exp(double(value) - double(top)) >= double(floor));
    };
    float best = -kInf, second = -kInf;
    int chosen = 0;  // in the slice
    const auto consider = [&](float value, int place) {
      const float score = value + noise_of.approximate(first + place);
      const bool better = score > best;
      second = fmaxf(second, better ? best : score);
      best = better ? score : best;
      chosen = better ? place : chosen;
    };
    if (tid == 0) s.ambiguous = 0;
    block_sync();
    if (pivot == last_of_key(kLowest) && !(floor > 0.0f)) {
      for_each_value([&](float value, int place) { consider(value, place); });
    } else {
      // Survivors are few: they are queued, so that the warp computes the noise of 32 at a time.
      uint32_t* queue = s.queue[warp];
      int queued = 0;
      const int peak_of_warp = warp_max(peak);
      const int end = peak_of_warp >= key_part(pivot) ? vectors : 0;
      for (int start = warp * 32; start < end; start += count) {
        const int i = start + lane;
        const float4 v = i < vectors ? four_at(i) : float4{-kInf, -kInf, -kInf, -kInf};
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const float value = c == 0 ? v.x : c == 1 ? v.y : c == 2 ? v.z : v.w;
          const bool in = survives(value, first + 4 * i + c);
          const uint32_t lanes = ballot(in);
          if (lanes == 0) continue;
          if (in) queue[queued + popcount(lanes & ((1u << lane) - 1))] = uint32_t(4 * i + c);
          queued += popcount(lanes);
          warp_sync();
          if (queued >= 32) {
            const int place = int(queue[lane]);
            consider(at(place), place);
            const uint32_t rest = lane + 32 < queued ? queue[lane + 32] : 0;
            warp_sync();
            queued -= 32;
            if (lane < queued) queue[lane] = rest;
            warp_sync();
          }
        }
      }
      if (lane < queued) consider(at(int(queue[lane])), int(queue[lane]));
    }
    const int best_key = block_max(key_of(best));
    const float high = value_of(best_key), enough = high - (2e-3f + 2e-6f * fabsf(high));
    BestToken exact;
    if (best > -kInf && best >= enough)
      exact.update(double(at(chosen)) + noise_of.exact(first + chosen), first + chosen);
    if (second > -kInf && second >= enough) s.ambiguous = 1;
    block_sync();
    if (s.ambiguous)  // a thread has two candidates within the error of the approximation
      for_each_value([&](float value, int place) {
        if (!(value > -kInf) || !survives(value, first + place)) return;
        if (value + noise_of.approximate(first + place) >= enough)
          exact.update(double(value) + noise_of.exact(first + place), first + place);
      });
    exact = best_of_block(exact);
    const uint64_t (*all)[2] = all_gather(bits_of(exact.score), uint64_t(uint32_t(exact.id)));
    if (rank == 0 && tid == 0) {
      BestToken winner;
      for (int r = 0; r < ranks; ++r) winner.update(double_of(all[r][0]), int(all[r][1]));
      write(winner);
    }
  }

  GM_DEVICE void run() {
    if (tid == 0) s.listed = 0;
    block_sync();
    cluster_arrive();
    griddepcontrol_wait();
    temperature = p.temperature[row];
    if (!(temperature >= 1e-5f)) return greedy();
    if (temperature == kInf) masked = kInf;
    load();
    cluster_wait();  // all blocks of the cluster have started
    s.peaks[tid] = peak;
    const uint64_t (*of)[2] = all_gather(sort_key(block_max(peak), -1), 0);
    uint64_t largest = 0;
    for (int r = 0; r < ranks; ++r) largest = of[r][0] > largest ? of[r][0] : largest;
    top_key = key_part(largest), top = value_of(top_key);
    if (top_key == INT_MAX || top_key < kLowest) {
      if (rank == 0 && tid == 0) p.ids[row] = -1;
      return;
    }
    const int k = p.top_k[row];
    const float share = p.top_p[row];
    const bool by_p = share < 1.0f;
    const double wanted = double(fmaxf(share, 0.0f));
    uint64_t pivot = last_of_key(kLowest);
    if (k > 0 && k < p.v) pivot = by_count(uint64_t(k), by_p, wanted);
    if (pivot != 0 && by_p) pivot = by_mass(key_part(pivot), wanted);
    if (pivot != 0) draw(pivot);
  }
};
#endif

}  // namespace gm
