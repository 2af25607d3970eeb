// gm_qk_norm_rope_cache under the sanitizers against float64: heads of every width around a vector, partial
// rotation, with and without norms, both pairings, negative slots, the last slot, a position outside the
// table, a slot past the cache, caches of the dtype and of codes with scales of heads and of tokens, every
// dtype and level.
#include "asan.h"
#include "asan_values.h"
#include "calls/qk_norm_rope_cache.h"

#include <type_traits>
#include <vector>

struct Options {
  int64_t wide;
};
GM_LEVELS(gm_qk_norm_rope_cache, (const GmQkNormRopeCacheCall&, const Options&));
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
template <class D, class W>
std::vector<double> turned(Buffer<typename D::T>& x, int64_t r, Buffer<typename W::T>& weight,
                           Buffer<float>& table, int64_t position, const Form& f) {
  std::vector<double> head(f.width);
  double squares = 0;
  for (int64_t i = 0; i < f.width; ++i) head[i] = D::get(x(r, i)), squares += head[i] * head[i];
  if (f.norm)
    for (int64_t i = 0; i < f.width; ++i)
      head[i] *= W::get(weight(0, i)) / std::sqrt(squares / double(f.width) + kEps);
  for (int64_t i = 0; i < f.rot / 2; ++i) {
    double &a = head[f.interleaved ? 2 * i : i], &b = head[f.interleaved ? 2 * i + 1 : f.rot / 2 + i];
    const double c = table(position, i), s = table(position, f.rot / 2 + i), first = a * c - b * s;
    b = b * c + a * s, a = first;
  }
  return head;
}

// S: of the cache; W: of the weights, D or float32.
template <class D, class S, class W = D>
void run(Call entry, int dtype, const Form& f) {
  using T = typename D::T;
  using C = typename S::T;
  const bool codes = f.kind != kPlain, by_token = f.kind == kTokenScales;
  const int64_t wide = f.width + 3, cells = kBlocks * kSize * kKv;
  Numbers numbers;
  Buffer<T> qkv(kTokens * kAll, f.width, wide), q(kTokens * kQ * f.width);
  Buffer<typename W::T> q_weight(f.width), k_weight(f.width);
  Buffer<C> keys(cells, f.width, wide), values(cells, f.width, wide);
  Buffer<float> table(kRows, f.rot, f.rot), k_scale(by_token ? cells : kKv), v_scale(by_token ? cells : kKv);
  Buffer<int64_t> positions(kTokens), slots(kTokens);
  for (int64_t r = 0; r < kTokens * kAll; ++r)
    for (int64_t i = 0; i < f.width; ++i) qkv(r, i) = D::put(numbers.eighths());
  for (int64_t i = 0; i < f.width; ++i)
    q_weight(0, i) = W::put(numbers.eighths()), k_weight(0, i) = W::put(numbers.eighths());
  for (int64_t p = 0; p < kRows; ++p)
    for (int64_t i = 0; i < f.rot; ++i) table(p, i) = numbers.eighths() / 4;
  const int64_t at[] = {1, 0, kRows, 0}, to[] = {kBlocks * kSize - 1, -1, 0, kBlocks * kSize};
  for (int64_t t = 0; t < kTokens; ++t) positions.data()[t] = at[t], slots.data()[t] = to[t];
  if (!by_token)
    for (int64_t h = 0; h < kKv; ++h) k_scale.data()[h] = 0.5f, v_scale.data()[h] = 2.0f;
  const int64_t block = kSize * kKv * wide, scale_block = by_token ? kSize * kKv : 99,
                scale_slot = by_token ? kKv : 99;
  const GmQkNormRopeCacheCall call{.qkv = qkv.data(),
                                   .qkv_stride = {kAll * wide, wide},
                                   .q_weight = f.norm ? q_weight.data() : nullptr,
                                   .k_weight = f.norm ? k_weight.data() : nullptr,
                                   .eps = kEps,
                                   .positions = positions.data(),
                                   .cos_sin = table.data(),
                                   .key_cache = keys.data(),
                                   .key_cache_stride = {block, kKv * wide, wide},
                                   .value_cache = values.data(),
                                   .value_cache_stride = {block, kKv * wide, wide},
                                   .slot_mapping = slots.data(),
                                   .interleaved = f.interleaved,
                                   .k_scale = codes ? k_scale.data() : nullptr,
                                   .k_scale_stride = {scale_block, scale_slot, 1},
                                   .v_scale = codes ? v_scale.data() : nullptr,
                                   .v_scale_stride = {scale_block, scale_slot, 1},
                                   .q = q.data(),
                                   .t = kTokens,
                                   .head_dim = f.width,
                                   .positions_count = kRows,
                                   .rot = f.rot,
                                   .blocks = kBlocks,
                                   .block_size = kSize,
                                   .kv_heads = kKv,
                                   .heads = kQ,
                                   .scale_blocks = by_token ? kBlocks : 1,
                                   .scale_slots = by_token ? kSize : 1,
                                   .scale_heads = kKv,
                                   .x_type = dtype,
                                   .kv_type = codes ? 3 : dtype};
  const Options options{!std::is_same_v<W, D>};
  const auto go = [&] { return entry(call, options); };
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
          turned<D, W>(qkv, t * kAll + h, h < kQ ? q_weight : k_weight, table, known ? at[t] : 0, f);
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
          if (norm && dtype != 0) {
            run<D, D, Dtype<0>>(call, dtype, {width, rot, norm, interleaved, kPlain});
            run<D, Dtype<3>, Dtype<0>>(call, dtype, {width, rot, norm, interleaved, kTokenScales});
          }
        }
  GmQkNormRopeCacheCall none{.head_dim = 4,
                             .positions_count = 1,
                             .rot = 4,
                             .blocks = 1,
                             .block_size = 1,
                             .kv_heads = 1,
                             .heads = 1,
                             .x_type = dtype};
  float scale = 1;
  CHECK(call(none, {}) == 0);
  none.x_type = 99;
  CHECK(call(none, {}) == -1);
  none.x_type = dtype, none.k_scale = &scale;
  CHECK(call(none, {}) == -2);
  none.k_scale = nullptr, none.rot = 6;
  CHECK(call(none, {}) == -2);
  none.head_dim = 1026;
  CHECK(call(none, {}) == 0);
  none.k_scale = none.v_scale = &scale;
  CHECK(call(none, {}) == -2);
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
