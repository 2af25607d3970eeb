// The scale and the e4m3 codes of one head of a token (kv_cache/quantized.py has the rules).
#pragma once
#include "gm_cpu.h"

namespace gm {
namespace {

// max(amax, 1e-10) / 448. As integers, magnitudes have the same order, and NaN is the largest.
template <class T>
float row_scale(const T* row, int64_t width) {
  vi amax_bits{};
  int64_t d = 0;
  const auto update = [&](vf v) {
    const vi magnitude = (vi)v & 0x7fffffff;
    amax_bits = magnitude > amax_bits ? magnitude : amax_bits;
  };
  for (; d + kLanes <= width; d += kLanes) update(load(row + d));
  if (d < width) update(load(row + d, width - d));
  int32_t top = 0;
  for (int i = 0; i < kLanes; ++i) top = amax_bits[i] > top ? amax_bits[i] : top;
  const float amax = bit_cast<float>(top);
  return (amax < 1e-10f ? 1e-10f : amax) / 448.0f;
}

template <class T>
void quantize_row(const T* row, f8e4m3* codes, int64_t width, float scale) {
  int64_t d = 0;
  for (; d + kLanes <= width; d += kLanes) store(codes + d, load(row + d) / scale);
  if (d < width) store(codes + d, load(row + d, width - d) / scale, width - d);
}

}  // namespace
}  // namespace gm
