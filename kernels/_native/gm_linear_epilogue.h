// Epilogue of linear: row multipliers of the weight, bias, silu(gate) * up, residual.
#pragma once
#include "gm_linear_decode.h"

namespace {
namespace lin {

template <class T>
struct Output {
  T* out;    // [rows, n]
  float* z;  // [rows, n], written instead of out where a gate follows; or null
  const T *bias, *residual;
};

// Applies row multipliers, bias and residual to totals [rows][width], of `count` blocks from block0 on. Job: any struct
// with n, blocks and row_scale of the weight.
template <class T, class Job>
void apply_epilogue(const Job& j, const Output<T>& o, int64_t block0, int64_t count, int64_t row0,
                    int64_t rows, const float* totals, int64_t width) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t b = 0; b < count && block0 + b < j.blocks; ++b)
#pragma GCC unroll 4
      for (int i = 0; i < kParts; ++i) {
        const int64_t lane = (block0 + b) * kRows + i * gm::kLanes, left = gm::min(j.n - lane, gm::kLanes);
        if (left <= 0) continue;
        gm::vf v = gm::load(totals + r * width + b * kRows + i * gm::kLanes);
        if (j.row_scale) v = v * gm::load(j.row_scale + lane);
        const int64_t at = (row0 + r) * j.n + lane;
        if (o.bias) v = v + (left == gm::kLanes ? gm::load(o.bias + lane) : gm::load(o.bias + lane, left));
        if (o.z) {
          left == gm::kLanes ? gm::store(o.z + at, v) : gm::store(o.z + at, v, left);
          continue;
        }
        if (o.residual)
          v = v + (left == gm::kLanes ? gm::load(o.residual + at) : gm::load(o.residual + at, left));
        left == gm::kLanes ? gm::store(o.out + at, v) : gm::store(o.out + at, v, left);
      }
}

// Activation of gate and up: none, silu(gate) * up, or g * sigmoid(alpha * g) * (u + 1) with g = min(gate, limit) and
// u = clamp(up, -limit, limit).
enum Gate : int { kUngated = 0, kSilu = 1, kClamped = 2 };
struct Gating {
  Gate kind;
  float alpha, limit;
};

// kClamped of z [rows][2 * columns], gate first -> out [rows][columns].
template <class T>
int swiglu_clamped(const float* z, T* out, int64_t rows, int64_t columns, const Gating& gating) {
  const float alpha = gating.alpha, limit = gating.limit;
  return gm::parallel_for(rows, 16384 / columns + 1, [=](int64_t begin, int64_t end) {
    const gm::vf high = gm::splat(limit), low = gm::splat(-limit);
    for (int64_t r = begin; r < end; ++r) {
      const float *gate = z + r * 2 * columns, *up = gate + columns;
      for (int64_t c = 0; c < columns; c += gm::kLanes) {
        const int64_t left = gm::min(columns - c, gm::kLanes), at = r * columns + c;
        const bool full = left == gm::kLanes;
        gm::vf g = full ? gm::load(gate + c) : gm::load(gate + c, left);
        gm::vf u = full ? gm::load(up + c) : gm::load(up + c, left);
        g = g > high ? high : g;  // a comparison with NaN is false: NaN passes through
        u = u > high ? high : u;
        u = u < low ? low : u;
        const gm::vf v = g / (1.0f + gm::exp(-(alpha * g))) * (u + 1.0f);
        full ? gm::store(out + at, v) : gm::store(out + at, v, left);
      }
    }
  });
}

// kSilu of z [rows][2 * columns], gate first, plus `added` -> out [rows][columns]; added: like out, or null.
template <class T>
int silu_mul(const float* z, const T* added, T* out, int64_t rows, int64_t columns) {
  return gm::parallel_for(rows, 16384 / columns + 1, [=](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float *gate = z + r * 2 * columns, *up = gate + columns;
      for (int64_t c = 0; c < columns; c += gm::kLanes) {
        const int64_t left = gm::min(columns - c, gm::kLanes), at = r * columns + c;
        const bool full = left == gm::kLanes;
        gm::vf v = full ? gm::silu(gm::load(gate + c)) * gm::load(up + c)
                        : gm::silu(gm::load(gate + c, left)) * gm::load(up + c, left);
        if (added) v = v + (full ? gm::load(added + at) : gm::load(added + at, left));
        full ? gm::store(out + at, v) : gm::store(out + at, v, left);
      }
    }
  });
}

}  // namespace lin
}  // namespace
