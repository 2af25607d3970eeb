// gm_qk_norm_rope_cache under the sanitizers against float64: heads of every width around a vector, partial
// rotation, with and without norms, both pairings, negative slots, the last slot, a position outside the
// table, a slot past the cache, caches of the dtype and of codes with scales of heads and of tokens, every
// dtype and level.
#include "asan.h"
#include "asan_values.h"

#include <vector>

GM_LEVELS(gm_qk_norm_rope_cache, (const void*, const void*, const void*, float, const int64_t*, const float*,
                                  void*, void*, const int64_t*, float*, float*, void*, const int64_t*, int));
using Call = decltype(gm_qk_norm_rope_cache_levels[0].call);

enum Kind { kPlain, kHeadScales, kTokenScales };

struct Form {
  int64_t width, rot;
  bool norm, interleaved;
  Kind kind;
};

constexpr int64_t kTokens = 4, kQ = 3, kKv = 2, kAll = kQ + 2 * kKv, kBlocks = 2, kSize = 3, kRows = 2;
constexpr float kEps = 0.25f;

// What a head becomes, in float64; the rounding between norm and rotation is in the tolerance.
template <class D>
std::vector<double> turned(Buffer<typename D::T>& x, int64_t r, Buffer<typename D::T>& weight,
                           Buffer<float>& table, int64_t position, const Form& f) {
  std::vector<double> head(f.width);
  double squares = 0;
  for (int64_t i = 0; i < f.width; ++i) head[i] = D::get(x(r, i)), squares += head[i] * head[i];
  if (f.norm)
    for (int64_t i = 0; i < f.width; ++i)
      head[i] *= D::get(weight(0, i)) / std::sqrt(squares / double(f.width) + kEps);
  for (int64_t i = 0; i < f.rot / 2; ++i) {
    double &a = head[f.interleaved ? 2 * i : i], &b = head[f.interleaved ? 2 * i + 1 : f.rot / 2 + i];
    const double c = table(position, i), s = table(position, f.rot / 2 + i), first = a * c - b * s;
    b = b * c + a * s, a = first;
  }
  return head;
}

template <class D, class S>
void run(Call call, int dtype, const Form& f) {
  using T = typename D::T;
  using C = typename S::T;
  const bool codes = f.kind != kPlain, by_token = f.kind == kTokenScales;
  const int64_t wide = f.width + 3, cells = kBlocks * kSize * kKv;
  Numbers numbers;
  Buffer<T> qkv(kTokens * kAll, f.width, wide), q_weight(f.width), k_weight(f.width),
      q(kTokens * kQ * f.width);
  Buffer<C> keys(cells, f.width, wide), values(cells, f.width, wide);
  Buffer<float> table(kRows, f.rot, f.rot), k_scale(by_token ? cells : kKv), v_scale(by_token ? cells : kKv);
  Buffer<int64_t> positions(kTokens), slots(kTokens);
  for (int64_t r = 0; r < kTokens * kAll; ++r)
    for (int64_t i = 0; i < f.width; ++i) qkv(r, i) = D::put(numbers.eighths());
  for (int64_t i = 0; i < f.width; ++i)
    q_weight(0, i) = D::put(numbers.eighths()), k_weight(0, i) = D::put(numbers.eighths());
  for (int64_t p = 0; p < kRows; ++p)
    for (int64_t i = 0; i < f.rot; ++i) table(p, i) = numbers.eighths() / 4;
  const int64_t at[] = {1, 0, kRows, 0}, to[] = {kBlocks * kSize - 1, -1, 0, kBlocks * kSize};
  for (int64_t t = 0; t < kTokens; ++t) positions.data()[t] = at[t], slots.data()[t] = to[t];
  if (!by_token)
    for (int64_t h = 0; h < kKv; ++h) k_scale.data()[h] = 0.5f, v_scale.data()[h] = 2.0f;
  const int64_t block = kSize * kKv * wide, scale_block = by_token ? kSize * kKv : 0,
                scale_place = by_token ? kKv : 0;
  const int64_t sizes[] = {
      kTokens,       kQ,      kKv,         f.width,     kAll * wide, wide,        kRows,       f.rot,
      f.interleaved, kBlocks, kSize,       by_token,    block,       kKv * wide,  wide,        block,
      kKv * wide,    wide,    scale_block, scale_place, 1,           scale_block, scale_place, 1};
  const auto go = [&] {
    return call(qkv.data(), f.norm ? q_weight.data() : nullptr, f.norm ? k_weight.data() : nullptr, kEps,
                positions.data(), table.data(), keys.data(), values.data(), slots.data(),
                codes ? k_scale.data() : nullptr, codes ? v_scale.data() : nullptr, q.data(), sizes, dtype);
  };
  CHECK(go() == -5);
  for (int64_t r = 0; r < cells; ++r) CHECK(S::get(keys(r, f.width - 1)) == 0);
  slots.data()[3] = -9;
  CHECK(go() == 0);
  const auto near = [&](double found, double wanted, double size, double step) {
    CHECK(std::fabs(found - wanted) <= 3e-6 + 3 * D::kEps * size + step);
  };
  for (int64_t t = 0; t < kTokens; ++t)
    for (int64_t h = 0; h < kQ + kKv; ++h) {
      if (h >= kQ && slots.data()[t] < 0) continue;
      const int64_t r = slots.data()[t] * kKv + h - kQ;
      const bool known = at[t] < kRows;
      const auto head =
          turned<D>(qkv, t * kAll + h, h < kQ ? q_weight : k_weight, table, known ? at[t] : 0, f);
      double largest = 0;
      for (double v : head) largest = std::fmax(largest, std::fabs(v));
      for (int64_t i = 0; i < f.width; ++i) {
        const float scale = h < kQ || !codes ? 1.0f : k_scale.data()[by_token ? r : h - kQ];
        const double found =
            h < kQ ? D::get(q.data()[(t * kQ + h) * f.width + i]) : scale * S::get(keys(r, i));
        if (!known && i < f.rot) {
          const uint8_t bits = codes && h >= kQ ? uint8_t(keys(r, i)) : 0;
          CHECK(bits == 0x7f || found != found);
        } else if (known) {
          near(found, head[i], largest + 1, h < kQ || !codes ? 0 : std::fabs(head[i]) / 14 + scale / 512);
        }
      }
    }
  for (int64_t t = 0; t < kTokens; ++t)
    for (int64_t h = 0; h < kKv; ++h)
      for (int64_t i = 0; i < f.width; ++i) {
        if (slots.data()[t] < 0) continue;
        const int64_t r = slots.data()[t] * kKv + h;
        const float scale = codes ? v_scale.data()[by_token ? r : h] : 1.0f;
        const double wanted = D::get(qkv(t * kAll + kQ + kKv + h, i));
        CHECK(std::fabs(scale * S::get(values(r, i)) - wanted) <=
              (codes ? std::fabs(wanted) / 16 + scale / 1024 : 0));
      }
}

template <class D>
void all(Call call, int dtype) {
  for (int64_t width : {2, 7, 8, 15, 16, 17, 33, 64, 66})
    for (int64_t cut : {0, 2})
      for (bool norm : {false, true})
        for (bool interleaved : {false, true}) {
          const int64_t rot = width / 2 * 2 - (width > 4 ? cut : 0);
          run<D, D>(call, dtype, {width, rot, norm, interleaved, kPlain});
          run<D, Dtype<3>>(call, dtype, {width, rot, norm, interleaved, kHeadScales});
          run<D, Dtype<3>>(call, dtype, {width, rot, norm, interleaved, kTokenScales});
        }
  int64_t sizes[24] = {0, 1, 1, 4, 0, 0, 1, 4, 0, 1, 1};
  const auto empty = [&](int type, float* k, float* v) {
    return call(nullptr, nullptr, nullptr, 0, nullptr, nullptr, nullptr, nullptr, nullptr, k, v, nullptr,
                sizes, type);
  };
  float scale = 1;
  CHECK(empty(dtype, nullptr, nullptr) == 0);
  CHECK(empty(99, nullptr, nullptr) == -1);
  CHECK(empty(dtype, &scale, nullptr) == -2);
  sizes[7] = 6;
  CHECK(empty(dtype, nullptr, nullptr) == -2);
  sizes[3] = 1026;
  CHECK(empty(dtype, nullptr, nullptr) == 0);
  CHECK(empty(dtype, &scale, &scale) == -2);
}

int main() {
  int ran = 0;
  for (const auto& level : gm_qk_norm_rope_cache_levels) {
    if (level.call == nullptr || !runs_here(level.name)) continue;
    all<Dtype<0>>(level.call, 0), all<Dtype<1>>(level.call, 1), all<Dtype<2>>(level.call, 2);
    ++ran;
  }
  CHECK(ran > 0);
  std::printf("qk_norm_rope_cache: %d level(s)\n", ran);
}
