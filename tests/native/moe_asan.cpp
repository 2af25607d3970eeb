// gm_moe_permute, gm_moe_combine, gm_grouped_linear and gm_moe under the sanitizers: empty experts, one
// expert with all rows, ids that are nobody's, act-order, several packings, every level. The composite is
// checked against float64 and its parts against what they promise.
//
// Planted faults that this program was seen to catch: ids not checked against `experts` in sort_by_expert
// (wild write), the last lanes of a row stored whole in `combine`, one expert too far in expert_product's
// codes, scales or zeros, `gather` without the bound of x.
#include "calls/combine.h"
#include "calls/grouped_linear.h"
#include "calls/moe.h"
#include "calls/permute.h"
#include "packed_weight.h"

GM_LEVELS(gm_moe_permute, (const GmPermuteCall&));
GM_LEVELS(gm_moe_combine, (const GmCombineCall&));
GM_LEVELS(gm_grouped_linear, (const GmGroupedLinearCall&, const Rows16Options&));
GM_LEVELS(gm_moe, (const GmMoeCall&, const Rows16Options&));
struct Permute {  // by position
  decltype(gm_moe_permute_levels[0].call) entry;
  int operator()(const int32_t* ids, int32_t* offsets, int32_t* permutation, int32_t* inverse, int64_t m,
                 int64_t experts) const {
    const GmPermuteCall call{.ids = ids,
                             .experts = experts,
                             .expert_offsets = offsets,
                             .permutation = permutation,
                             .inverse = inverse,
                             .m = m,
                             .top_k = 1};
    return entry(call);
  }
};
struct Combine {
  decltype(gm_moe_combine_levels[0].call) entry;
  int operator()(const void* y, int64_t rows, const int32_t* inverse, const float* weights, void* out,
                 int64_t m, int64_t top_k, int64_t h, int type) const {
    const GmCombineCall call{.y = y,
                             .inverse = inverse,
                             .weights = weights,
                             .out = out,
                             .rows = rows,
                             .h = h,
                             .m = m,
                             .top_k = top_k,
                             .x_type = type};
    return entry(call);
  }
};
constexpr float kAlpha = 1.702f, kLimit = 1.25f;

namespace {

// Row i of expert e times x, and the sum of the terms' sizes.
template <class Get>
double product(PackedWeight& w, int64_t e, int64_t i, const Get& x, double& size) {
  double sum = 0;
  size = 0;
  for (int64_t c = 0; c < w.columns; ++c)
    if (w.source(c) >= 0)
      sum += w.at(e, i, c) * x(w.source(c)), size += std::fabs(w.at(e, i, c) * x(w.source(c)));
  return sum;
}

// ids of `entries`: every third is of expert 0, a few of nobody, and expert 1 is empty.
void deal(Buffer<int32_t>& ids, int64_t entries, int64_t experts, Numbers& numbers) {
  for (int64_t i = 0; i < entries; ++i) {
    int32_t id = i % 3 == 0 ? 0 : int32_t(numbers.below(experts));
    if (id == 1) id = int32_t(experts - 1);
    ids.data()[i] = i % 7 == 5 ? (i % 2 ? -1 : int32_t(experts) + 4) : id;
  }
}

void permute(Permute call) {
  for (const int64_t experts : {1, 2, 7, 257})
    for (const int64_t entries : {0, 1, 7, 257}) {
      Numbers numbers;
      Buffer<int32_t> ids(entries), offsets(experts + 1), permutation(entries), inverse(entries);
      deal(ids, entries, experts, numbers);
      CHECK(call(ids.data(), offsets.data(), permutation.data(), inverse.data(), entries, experts) == 0);
      CHECK(offsets.data()[0] == 0 && offsets.data()[experts] <= entries);
      std::vector<bool> seen(entries);
      for (int64_t e = 0; e < experts; ++e)
        for (int64_t at = offsets.data()[e]; at < offsets.data()[e + 1]; ++at) {
          const int32_t entry = permutation.data()[at];
          CHECK(ids.data()[entry] == e && inverse.data()[entry] == at && !seen[entry]);
          CHECK(at == offsets.data()[e] || permutation.data()[at - 1] < entry);
          seen[entry] = true;
        }
      for (int64_t at = offsets.data()[experts]; at < entries; ++at)
        CHECK(inverse.data()[permutation.data()[at]] == -1);
    }
  CHECK(call(nullptr, nullptr, nullptr, nullptr, -1, 4) == -2);
  CHECK(call(nullptr, nullptr, nullptr, nullptr, 0, 0) == -2);
}

template <class D>
void combine(Combine call, int dtype) {
  using T = typename D::T;
  for (const int64_t width : {1, 7, 16, 33, 257})
    for (const int64_t tokens : {0, 1, 5}) {
      Numbers numbers;
      const int64_t top_k = 3, entries = tokens * top_k;
      Buffer<T> y(entries, width, width), out(tokens, width, width);
      Buffer<int32_t> inverse(entries);
      Buffer<float> weights(entries);
      for (int64_t i = 0; i < entries; ++i) {
        inverse.data()[i] = i % 4 == 3 ? -1 : int32_t(entries - 1 - i), weights.data()[i] = numbers.eighths();
        for (int64_t c = 0; c < width; ++c) y(i, c) = D::put(numbers.eighths());
      }
      CHECK(call(y.data(), entries, inverse.data(), weights.data(), out.data(), tokens, top_k, width,
                 dtype) == 0);
      for (int64_t t = 0; t < tokens; ++t)
        for (int64_t c = 0; c < width; ++c) {
          double wanted = 0;
          for (int64_t k = t * top_k; k < (t + 1) * top_k; ++k)
            if (inverse.data()[k] >= 0) wanted += weights.data()[k] * double(D::get(y(inverse.data()[k], c)));
          CHECK(std::fabs(D::get(out(t, c)) - wanted) <= 1e-5 + D::kEps * std::fabs(wanted));
        }
      if (tokens == 0) continue;
      inverse.data()[0] = int32_t(entries);
      CHECK(call(y.data(), entries, inverse.data(), weights.data(), out.data(), tokens, top_k, width,
                 dtype) == -5);
    }
}

template <class D>
void grouped(decltype(gm_grouped_linear_levels[0].call) call, int dtype, const Packing& packing,
             bool ordered) {
  using T = typename D::T;
  const int64_t counts[] = {0, 1, 9, 0, 2, 3}, experts = 6, rows = 17, n = 18, k = 70, top_k = 2,
                x_rows = 9;  // two rows are nobody's
  Numbers numbers;
  PackedWeight w(packing, experts, n, k, ordered, numbers);
  Buffer<int32_t> offsets(experts + 1), permutation(rows);
  for (int64_t e = 0; e < experts; ++e) offsets.data()[e + 1] = offsets.data()[e] + int32_t(counts[e]);
  for (int64_t r = 0; r < rows; ++r) permutation.data()[r] = int32_t(rows - r);  // the last token once
  for (const bool gathered : {false, true})
    for (const int gate : {0, 1, 2}) {
      const int64_t width = gate ? n / 2 : n, from = gathered ? x_rows : rows;
      Buffer<T> x(from, k, k), out(rows, width, width), bias(gate == 1 ? 0 : experts * n);
      for (size_t i = 0; gate != 1 && i < size_t(experts * n); ++i)
        bias.data()[i] = D::put(numbers.eighths());
      for (int64_t i = 0; i < from * k; ++i) x.data()[i] = D::put(numbers.eighths());
      GmGroupedLinearCall linear{.x = x.data(),
                                 .expert_offsets = offsets.data(),
                                 .permutation = gathered ? permutation.data() : nullptr,
                                 .top_k = top_k,
                                 .silu_mul = gate != 0,
                                 .n = n,
                                 .bias = gate == 1 ? nullptr : bias.data(),
                                 .clamp = gate == 2,
                                 .alpha = kAlpha,
                                 .limit = kLimit,
                                 .out = out.data(),
                                 .k = k,
                                 .e = experts,
                                 .m = rows,
                                 .x_type = dtype};
      w.into(linear.weight, linear.weight_size, linear.weight_type);
      const auto run = [&](int64_t of_x) {
        linear.rows = of_x;
        return call(linear, w.options());
      };
      std::memset(out.data(), 0xff, sizeof(T) * rows * width);
      CHECK(run(from) == 0);
      for (int64_t e = 0; e < experts; ++e)
        for (int64_t r = offsets.data()[e]; r < offsets.data()[e + 1]; ++r) {
          const int64_t row = gathered ? permutation.data()[r] / top_k : r;
          const auto value = [&](int64_t c) { return double(D::get(x(row, c))); };
          for (int64_t i = 0; i < width; ++i) {
            double size, other;
            const auto added = [&](int64_t c) {
              return gate == 1 ? 0.0 : double(D::get(bias.data()[e * n + c]));
            };
            double wanted = product(w, e, i, value, size) + added(i), bound = size;
            if (gate) {
              const double up = product(w, e, i + width, value, other) + added(i + width);
              bound = size * (std::fabs(up) + 1) + other * (std::fabs(wanted) + 1);
              const double g = std::fmin(wanted, kLimit), u = std::fmax(std::fmin(up, kLimit), -kLimit);
              wanted = gate == 1 ? wanted / (1 + std::exp(-wanted)) * up
                                 : g / (1 + std::exp(-kAlpha * g)) * (u + 1);
            }
            if (dtype == 1 && std::fabs(wanted) > 60000) continue;  // near float16's end
            CHECK(std::fabs(D::get(out(r, i)) - wanted) <=
                  1e-5 + 32e-6 * bound + D::kEps * std::fabs(wanted));
          }
        }
      for (int64_t i = offsets.data()[experts] * width; i < rows * width; ++i)
        CHECK(D::get(out.data()[i]) == 0);
      if (gathered) CHECK(run(x_rows - 1) == -5);
      linear.e = experts - 1;
      CHECK(run(from) == -2);
      linear.e = experts;
      offsets.data()[experts] = rows + 1;
      CHECK(run(from) == -5);
      offsets.data()[experts] = 15;
    }
}

struct Form {
  GmMoeCall::Activation activation;
  bool gated, clamp;
};

template <class D>
void composite(decltype(gm_moe_levels[0].call) call, int dtype, const Packing& packing, int64_t tokens,
               int64_t experts, const Form& form) {
  using T = typename D::T;
  const int64_t top_k = 3, entries = tokens * top_k, hidden = 35, inner = 17,
                up = form.gated ? 2 * inner : inner;
  Numbers numbers;
  PackedWeight w13(packing, experts, up, hidden, false, numbers),
      w2(packing, experts, hidden, inner, false, numbers);
  const int64_t aligned = 255,
                parts[] = {4 * (experts + 1), 4 * entries, 4 * entries, entries * inner * int64_t(sizeof(T)),
                           entries * hidden * int64_t(sizeof(T))};
  int64_t at[6] = {};
  for (int i = 0; i < 5; ++i) at[i + 1] = at[i] + (parts[i] + aligned) / 256 * 256;
  Buffer<char> workspace(at[5]);
  const auto* inverse = reinterpret_cast<const int32_t*>(workspace.data() + at[2]);
  const T* acts = reinterpret_cast<const T*>(workspace.data() + at[3]);
  Buffer<T> x(tokens, hidden, hidden), out(tokens, hidden, hidden), w13_bias(experts * up),
      w2_bias(experts * hidden);
  Buffer<float> weights(entries);
  Buffer<int32_t> ids(entries);
  for (int64_t i = 0; i < tokens * hidden; ++i) x.data()[i] = D::put(numbers.eighths() / 4);
  for (int64_t i = 0; i < entries; ++i) weights.data()[i] = numbers.eighths();
  for (int64_t i = 0; i < experts * up; ++i) w13_bias.data()[i] = D::put(numbers.eighths());
  for (int64_t i = 0; i < experts * hidden; ++i) w2_bias.data()[i] = D::put(numbers.eighths());
  deal(ids, entries, experts, numbers);
  GmMoeCall chain{.x = x.data(),
                  .weights = weights.data(),
                  .ids = ids.data(),
                  .inter = inner,
                  .workspace = workspace.data(),
                  .workspace_bytes = at[5],
                  .w13_bias = w13_bias.data(),
                  .w2_bias = w2_bias.data(),
                  .clamp = form.clamp,
                  .alpha = kAlpha,
                  .limit = kLimit,
                  .activation = form.activation,
                  .gated = form.gated,
                  .out = out.data(),
                  .m = tokens,
                  .h = hidden,
                  .top_k = top_k,
                  .e = experts,
                  .x_type = dtype};
  w13.into(chain.w13, chain.w13_size, chain.w13_type), w2.into(chain.w2, chain.w2_size, chain.w2_type);
  CHECK(call(chain, w13.options()) == 0);
  GmMoeCall other = chain;
  other.clamp = true, other.activation = GmMoeCall::Activation::relu2;
  CHECK(call(other, w13.options()) == -5);
  if (tokens > 0) {
    GmMoeCall small = chain;
    small.workspace_bytes -= 256;
    CHECK(call(small, w13.options()) == -2);
    small.workspace = nullptr;
    CHECK(call(small, w13.options()) == -2);
  }
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t i = 0; i < hidden; ++i) {
      double wanted = 0, bound = 0;
      for (int64_t entry = t * top_k; entry < (t + 1) * top_k; ++entry) {
        if (inverse[entry] < 0) continue;
        const int64_t e = ids.data()[entry], place = inverse[entry];
        double size;  // acts were rounded to T: the second product is judged from them
        const double y =
            product(
                w2, e, i, [&](int64_t c) { return double(D::get(acts[place * inner + c])); }, size) +
            double(D::get(w2_bias.data()[e * hidden + i]));
        wanted += weights.data()[entry] * y;
        bound += std::fabs(weights.data()[entry]) * (size * 32e-6 + std::fabs(y) * D::kEps);
      }
      CHECK(std::fabs(D::get(out(t, i)) - wanted) <= 1e-4 + 2 * bound + D::kEps * std::fabs(wanted));
    }
}

}  // namespace

int main() {
  using Activation = GmMoeCall::Activation;
  int ran = 0;
  for (const auto& level : gm_moe_permute_levels)
    if (level.call != nullptr && runs_here(level.name)) permute({level.call}), ++ran;
  for (const auto& level : gm_moe_combine_levels) {
    if (level.call == nullptr || !runs_here(level.name)) continue;
    combine<Dtype<0>>({level.call}, 0), combine<Dtype<1>>({level.call}, 1),
        combine<Dtype<2>>({level.call}, 2);
    ++ran;
  }
  for (const auto& level : gm_grouped_linear_levels) {
    if (level.call == nullptr || !runs_here(level.name)) continue;
    for (const Packing& p : packings()) {
      grouped<Dtype<0>>(level.call, 0, p, true), grouped<Dtype<1>>(level.call, 1, p, false),
          grouped<Dtype<2>>(level.call, 2, p, false);
    }
    ++ran;
  }
  for (const auto& level : gm_moe_levels) {
    if (level.call == nullptr || !runs_here(level.name)) continue;
    for (const Packing& p : packings())
      for (const int64_t tokens : {0, 1, 11})
        for (const Form& form :
             {Form{Activation::silu, true, true}, Form{Activation::silu, true, false},
              Form{Activation::gelu_tanh, true, false}, Form{Activation::relu2, false, false}}) {
          composite<Dtype<0>>(level.call, 0, p, tokens, 5, form);
          composite<Dtype<2>>(level.call, 2, p, tokens, 2, form);
        }
    ++ran;
  }
  CHECK(ran > 3);
  std::printf("moe: %d level(s) of 4 cores\n", ran);
}
