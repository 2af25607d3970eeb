// Quantization of rows to e4m3 or int8 (kernels/quantized_rows.py has the formats, quant/activations.py the rules). The
// caller computes the values twice, for the maximum and for the codes, so that a row needs no memory.
#pragma once
#include "gm_cpu.h"

namespace gm {
namespace {

struct RowFormat {
  int64_t group;     // columns that share a scale; 0: the row
  float least, top;  // lower bound of amax, 0 if the scale is given; largest code
};

// By the enum class of a call.
template <class Format>
RowFormat row_format(Format format) {
  switch (format) {
    case Format::fp8:
      return {0, 0.0f, 448.0f};
    case Format::fp8_token:
      return {0, 1e-10f, 448.0f};
    case Format::fp8_g128:
      return {128, 1e-4f, 448.0f};
    case Format::int8_token:
      return {0, 1e-10f, 127.0f};
    case Format::int8_g32:
      return {32, 1e-10f, 127.0f};
    case Format::int8_g128:
      return {128, 1e-10f, 127.0f};
  }
  __builtin_unreachable();
}

typedef int8_t vc __attribute__((vector_size(kLanes)));

// v rounded to T and back.
template <class T>
inline vf rounded(vf v) {
  if constexpr (sizeof(T) == sizeof(float))
    return v;
  else
    return widen(narrow(v, T{}), T{});
}

// To nearest, ties to even, saturated at -128 and 127. The code of NaN is arbitrary: its scale is NaN.
inline vc to_int8(vf v) {
  // 1.5 * 2^23: adding it rounds to an integer held in the low mantissa bits.
  const vf magic = splat(12582912.0f);
  const vf clamped = min(max(v, splat(-128.0f)), splat(127.0f));
  return __builtin_convertvector((vi)(clamped + magic) - 0x4b400000, vc);
}

inline void store_codes(int8_t* p, vf v) {
  const vc codes = to_int8(v);
  std::memcpy(p, &codes, sizeof codes);
}
inline void store_codes(f8e4m3* p, vf v) { store(p, v); }

// values(c, n) -> the n <= kLanes values from column c; lanes past n are ignored here.
template <class Code, class Values>
void quantize_values(const Values& values, int64_t cols, Code* codes, float* scales, int64_t scale_stride,
                     const RowFormat& f) {
  constexpr int64_t L = kLanes;
  const int64_t group = f.group ? f.group : cols;
  for (int64_t begin = 0, g = 0; begin < cols; begin += group, ++g) {
    const int64_t end = begin + group < cols ? begin + group : cols;
    if (f.least > 0.0f) {
      vi amax_bits{};  // as integers, magnitudes have the same order, and NaN is the largest
      for (int64_t c = begin; c < end; c += L) {
        const int64_t n = end - c < L ? end - c : L;
        vi magnitude = (vi)values(c, n) & 0x7fffffff;
        for (int64_t i = n; i < L; ++i) magnitude[i] = 0;
        amax_bits = magnitude > amax_bits ? magnitude : amax_bits;
      }
      int32_t top = 0;
      for (int i = 0; i < kLanes; ++i) top = amax_bits[i] > top ? amax_bits[i] : top;
      const float amax = bit_cast<float>(top);
      scales[g * scale_stride] = (amax < f.least ? f.least : amax) / f.top;
    }
    const float scale = scales[g * scale_stride];
    int64_t c = begin;
    for (; c + L <= end; c += L) store_codes(codes + c, values(c, L) / scale);
    if (c < end) {
      Code tail[kLanes];
      store_codes(tail, values(c, end - c) / scale);
      std::memcpy(codes + c, tail, size_t(end - c));
    }
  }
}

// Quantizes the rows of a call whose activations have m rows of n columns. The scale of the tensor is read, others are
// written. of_row(T{}, r, take) calls take(values) once, with the values of row r as quantize_values takes them.
// elements: of a task, about.
template <class Call, class OfRow>
int quantize_rows(const Call& call, int64_t elements, const OfRow& of_row) {
  if (call.m < 0 || call.n < 1) return GM_E_SHAPE;
  const RowFormat format = row_format(call.format);
  // One scale is given for all rows where there is no lower bound of amax.
  const int64_t scales = format.least == 0.0f ? 0 : call.scales_stride[0];
  const auto quantize = [&](auto type, auto* codes) {
    return parallel_for(call.m, elements / call.n + 1, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r)
        of_row(type, r, [&](const auto& values) {
          quantize_values(values, call.n, codes + r * call.codes_stride[0],
                          static_cast<float*>(call.scales) + r * scales, call.scales_stride[1], format);
        });
    });
  };
  GM_DISPATCH_FLOAT(call.x_type, T, {
    return call.q_type == GM_I8 ? quantize(T{}, static_cast<int8_t*>(call.codes))
                                : quantize(T{}, static_cast<f8e4m3*>(call.codes));
  })
}

}  // namespace
}  // namespace gm
