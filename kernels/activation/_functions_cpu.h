// The functions of `activation` on vectors of float32.
#pragma once
#include "gm_cpu.h"

namespace {
namespace act {

using gm::vf;

// x · Φ(x), Φ = erfc(-x / √2) / 2, with a relative error that does not grow for negative x. For a >= 0
// erfc(a) = t P(t) e^(-a²), t = 1 / (1 + a / 2): a polynomial of degree 8 that was fitted to the relative error of
// erfc(a) e^(a²), which is at most 4.5e-8.
inline vf gelu(vf x) {
  const vf clamped = x < -15.0f ? gm::splat(-15.0f) : x;  // NaN passes through; there the product is 0
  vf a = gm::abs(clamped);
  a = a > 15.0f ? gm::splat(15.0f) : a;
  const vf t = 1.0f / (1.0f + a * 0.35355339059327379f);  // a / √2 / 2
  vf p = gm::splat(-0.05938642472028732f);
  p = gm::fma(p, t, gm::splat(0.2861238420009613f));
  p = gm::fma(p, t, gm::splat(-0.49040618538856506f));
  p = gm::fma(p, t, gm::splat(0.2817331850528717f));
  p = gm::fma(p, t, gm::splat(-0.029148561879992485f));
  p = gm::fma(p, t, gm::splat(0.2037525773048401f));
  p = gm::fma(p, t, gm::splat(0.24283508956432343f));
  p = gm::fma(p, t, gm::splat(0.2824121117591858f));
  p = gm::fma(p, t, gm::splat(0.2820843458175659f));
  const vf tail = 0.5f * t * p * gm::exp(a * a * -0.5f);  // 1 - Φ(a)
  return x > 0.0f ? x - a * tail : clamped * tail;
}

// x / 2 · (1 + tanh z) = x · sigmoid(2 z), z = √(2/π) · (x + 0.044715 x³).
inline vf times_sigmoid(vf x, vf z) {
  const vf share = 1.0f / (1.0f + gm::exp(-z));
  return share == 0.0f ? share : x * share;  // -inf · 0 is 0, as the limit
}
inline vf gelu_tanh(vf x) { return times_sigmoid(x, 1.5957691216057308f * (x + 0.044715f * x * x * x)); }
inline vf silu(vf x) { return times_sigmoid(x, x); }

inline vf relu(vf x) { return x < 0.0f ? gm::zero() : x; }  // NaN stays NaN

inline vf relu2(vf x) { return relu(x) * relu(x); }

// Calls run(f) with a function of `activation`, by its name in an enum class.
template <class Choice, class Run>
void with_function(Choice choice, const Run& run) {
  switch (choice) {
    case Choice::gelu:
      return run([](vf x) { return gelu(x); });
    case Choice::gelu_tanh:
      return run([](vf x) { return gelu_tanh(x); });
    case Choice::silu:
      return run([](vf x) { return silu(x); });
    case Choice::relu:
      return run([](vf x) { return relu(x); });
    case Choice::relu2:
      return run([](vf x) { return relu2(x); });
  }
}

// out may be x.
template <class T, class Function>
void map_row(const T* x, T* out, int64_t cols, const Function& f) {
  constexpr int L = gm::kLanes;
  int64_t c = 0;
  for (; c + L <= cols; c += L) gm::store(out + c, f(gm::load(x + c)));
  if (c < cols) gm::store(out + c, f(gm::load(x + c, cols - c)), cols - c);
}

// out may be gate or up.
template <class T, class Function>
void gate_row(const T* gate, const T* up, T* out, int64_t cols, const Function& f) {
  constexpr int L = gm::kLanes;
  int64_t c = 0;
  for (; c + L <= cols; c += L) gm::store(out + c, f(gm::load(gate + c)) * gm::load(up + c));
  if (c < cols) gm::store(out + c, f(gm::load(gate + c, cols - c)) * gm::load(up + c, cols - c), cols - c);
}

}  // namespace act
}  // namespace
