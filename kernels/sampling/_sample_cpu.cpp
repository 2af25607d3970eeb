// Sampling: temperature, top-k, top-p, min-p, then Gumbel-max with Philox4x32-10 noise. See sample.py
// for the definition.
// gm-levels: base avx2 avx512 neon
#include <cmath>
#include <cstdlib>

#include "calls/sample.h"
#include "gm_cpu.h"

namespace {

constexpr float kInf = __builtin_inff();

// float32 order as unsigned integers; -0 counts as 0.
inline uint32_t sort_key(float v) {
  const uint32_t bits = gm::bit_cast<uint32_t>(v == 0.0f ? 0.0f : v);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
inline float value_of(uint32_t order) {
  return gm::bit_cast<float>(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}

struct Request {
  float temperature;
  int32_t top_k;
  float top_p, min_p;
  uint64_t seed, index;
};

// The first two Philox words of tokens token...token + kLanes - 1.
inline void philox(gm::vu token, const Request& r, gm::vu& w0, gm::vu& w1) {
  typedef uint64_t vw __attribute__((vector_size(8 * gm::kLanes)));
  gm::vu c0 = gm::vu{} + uint32_t(r.index), c1 = gm::vu{} + uint32_t(r.index >> 32), c2 = token,
         c3 = gm::vu{};
  uint32_t k0 = uint32_t(r.seed), k1 = uint32_t(r.seed >> 32);
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    const vw p0 = __builtin_convertvector(c0, vw) * 0xD2511F53ull,
             p1 = __builtin_convertvector(c2, vw) * 0xCD9E8D57ull;
    c0 = __builtin_convertvector(p1 >> 32, gm::vu) ^ c1 ^ k0;
    c1 = __builtin_convertvector(p1, gm::vu);
    c2 = __builtin_convertvector(p0 >> 32, gm::vu) ^ c3 ^ k1;
    c3 = __builtin_convertvector(p0, gm::vu);
  }
  w0 = c0;
  w1 = c1;
}

inline double gumbel(uint32_t w0, uint32_t w1) {
  const double u = (double((uint64_t(w0) << 20) | (w1 >> 12)) + 0.5) * 0x1p-52;
  return -std::log(-std::log(u));
}

// Sets values below the k-th largest to -inf: bisection over sort keys, one counting pass per bit.
void filter_top_k(float* z, int64_t padded, int64_t k) {
  uint32_t kth_order = 0;
  for (uint32_t bit = 0x80000000u; bit; bit >>= 1) {
    const gm::vf limit = gm::splat(value_of(kth_order | bit));
    gm::vi count = gm::vi{};
    for (int64_t i = 0; i < padded; i += gm::kLanes) count -= (gm::load(z + i) >= limit);
    int64_t total = 0;
    for (int l = 0; l < gm::kLanes; ++l) total += count[l];
    if (total >= k) kth_order |= bit;
  }
  const gm::vf limit = gm::splat(value_of(kth_order));
  for (int64_t i = 0; i < padded; i += gm::kLanes) {
    const gm::vf v = gm::load(z + i);
    gm::store(z + i, v < limit ? gm::splat(-kInf) : v);
  }
}

// Keeps the most probable tokens while the cumulative mass before each is below p; of equal ones the lower ids first.
int filter_top_p(float* z, int64_t n, double top, double p) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) count += z[i] > -kInf;
  struct Item {
    double weight;
    uint32_t order;
  };
  Item* items = static_cast<Item*>(std::malloc(sizeof(Item) * (count ? count : 1)));
  if (items == nullptr) return GM_E_NOMEM;
  double total = 0;
  for (int64_t i = 0, j = 0; i < n; ++i)
    if (z[i] > -kInf) {
      items[j] = Item{std::exp(double(z[i]) - top), sort_key(z[i])};
      total += items[j++].weight;
    }
  const double wanted = p * total;
  // The smallest order with less than `wanted` mass above it. above: mass above the remaining range [low, high].
  double above = 0;
  uint32_t low = sort_key(-kInf), high = sort_key(float(top));
  int64_t left = count;
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2;
    double mass = 0;
    for (int64_t j = 0; j < left; ++j) mass += items[j].order > middle ? items[j].weight : 0.0;
    const bool below = above + mass < wanted;
    int64_t next = 0;
    for (int64_t j = 0; j < left; ++j)
      if ((items[j].order <= middle) == below) items[next++] = items[j];
    left = next;
    if (below) {
      above += mass;
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  double equals = 0;  // all that is left has the order `low`
  for (int64_t j = 0; j < left; ++j) equals += items[j].order == low;
  std::free(items);
  const float limit = value_of(low);
  double room = std::ceil((wanted - above) / std::exp(double(limit) - top));
  if (!(room >= 1)) room = 1;
  if (room > equals) room = equals;
  for (int64_t i = 0; i < n; ++i) {
    if (z[i] < limit) z[i] = -kInf;
    if (z[i] == limit && room-- < 1) z[i] = -kInf;
  }
  return GM_OK;
}

// z: `padded` floats, -inf past n.
int sample_row(float* z, int64_t n, int64_t padded, const Request& r, int64_t* id) {
  *id = -1;
  gm::vf top = gm::splat(-kInf);
  gm::vi wrong = gm::vi{};
  for (int64_t i = 0; i < padded; i += gm::kLanes) {
    const gm::vf v = gm::load(z + i);
    top = gm::max(v, top);
    wrong |= (v != v) | (v == kInf);
  }
  for (int l = 0; l < gm::kLanes; ++l)
    if (wrong[l]) return GM_OK;
  const float largest = gm::max(top);
  if (largest == -kInf) return GM_OK;
  if (!(r.temperature >= 1e-5f)) {
    for (*id = 0; z[*id] != largest;) ++*id;
    return GM_OK;
  }
  if (r.top_k > 0 && r.top_k < n) filter_top_k(z, padded, r.top_k);
  if (r.top_p < 1.0f)
    if (const int code = filter_top_p(z, n, largest, r.top_p)) return code;
  if (r.min_p > 0.0f)
    for (int64_t i = 0; i < n; ++i)
      if (std::exp(double(z[i]) - largest) < double(r.min_p)) z[i] = -kInf;
  gm::vu token;
  for (int l = 0; l < gm::kLanes; ++l) token[l] = uint32_t(l);
  double best = -__builtin_inf();
  float bound = -kInf;
  for (int64_t i = 0; i < padded; i += gm::kLanes, token += uint32_t(gm::kLanes)) {
    const gm::vf v = gm::load(z + i);
    gm::vu w0, w1;
    // z - log(-log u) reaches best only if -log u <= exp(z - best), and -log u >= 1 - u: most tokens are rejected here. The
    // margins in `bound` are far above float32's rounding errors.
    const gm::vf limit = gm::exp(v - bound);
    philox(token, r, w0, w1);
    const gm::vi may = (v > -kInf) & ~(__builtin_convertvector(~w0 >> 8, gm::vf) * 0x1p-24f > limit);
    for (int l = 0; l < gm::kLanes; ++l) {
      if (!may[l]) continue;
      const double score = double(v[l]) + gumbel(w0[l], w1[l]);
      if (score > best) {
        best = score;
        *id = i + l;
        bound = float(best - 1e-3 - 1e-5 * std::fabs(best));
      }
    }
  }
  if (*id < 0) *id = 0;  // a min_p above 1 bars every token: of equally impossible ones the first
  return GM_OK;
}

template <class T>
int row(const T* logits, int64_t n, const Request& r, int64_t* id) {
  const int64_t padded = (n + gm::kLanes - 1) / gm::kLanes * gm::kLanes;
  float* z = static_cast<float*>(std::malloc(sizeof(float) * padded));
  if (z == nullptr) return GM_E_NOMEM;
  const gm::vf divisor = gm::splat(r.temperature >= 1e-5f ? r.temperature : 1.0f);
  for (int64_t i = 0; i < padded; i += gm::kLanes)
    gm::store(z + i, (i + gm::kLanes <= n ? gm::load(logits + i) : gm::load(logits + i, n - i)) / divisor);
  for (int64_t i = n; i < padded; ++i) z[i] = -kInf;
  const int code = sample_row(z, n, padded, r, id);
  std::free(z);
  return code;
}

}  // namespace

GM_CPU_CALL(gm_sample, Sample)(const GmSampleCall& call) {
  if (call.m < 0 || call.v < 1 || call.v > INT32_MAX) return GM_E_SHAPE;
  int status = GM_OK;
  GM_DISPATCH_FLOAT(call.x_type, T, {
    const int code = gm::parallel_for(call.m, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const Request r{
            static_cast<const float*>(call.temperature)[i], static_cast<const int32_t*>(call.top_k)[i],
            static_cast<const float*>(call.top_p)[i],       static_cast<const float*>(call.min_p)[i],
            static_cast<const uint64_t*>(call.seed)[i],     static_cast<const uint64_t*>(call.index)[i]};
        const T* logits = static_cast<const T*>(call.logits) + i * call.logits_stride[0];
        if (const int failed = row(logits, call.v, r, static_cast<int64_t*>(call.ids) + i))
          __atomic_store_n(&status, failed, __ATOMIC_RELAXED);
      }
    });
    return code ? code : status;
  })
}
