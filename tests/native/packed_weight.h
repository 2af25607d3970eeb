// A weight of random codes packed as cpu_rows16_v1, and what it means in float64, for the sanitizer programs
// of linear and MoE.
#pragma once
#include "asan.h"
#include "asan_values.h"

#include <vector>

struct Packing {
  const char* name;
  int format, bits;  // the codes' format as gm_linear_rows16 counts them
  int64_t group;     // 0: one scale per row, or none
  int scale_type;    // dtype code, 20 = E8M0, -1 = none
  int zero_type;     // -1 = none
  int implicit_zero;
  bool row_scale;
};

// The options of the entries, in their order.
struct Rows16Options {
  int64_t format, columns, group, zero, e8m0;
};

inline const std::vector<Packing>& packings() {
  static const std::vector<Packing> all = {{"int4_g128", 0, 4, 128, 2, -1, 8, false},
                                           {"int4_g32 f16", 0, 4, 32, 1, -1, 8, false},
                                           {"int4_g64_zp", 0, 4, 64, 2, 6, 0, false},
                                           {"int4_ch", 0, 4, 0, 0, -1, 8, false},
                                           {"int4_g32 float zeros", 0, 4, 32, 0, 0, 0, false},
                                           {"mxfp4", 1, 4, 32, 20, -1, 0, false},
                                           {"nvfp4", 1, 4, 16, 3, -1, 0, true},
                                           {"int8_ch", 2, 8, 0, 0, -1, 128, false},
                                           {"int8_g128_zp", 2, 8, 128, 1, 6, 0, false},
                                           {"fp8_ch", 3, 8, 0, 0, -1, 0, false},
                                           {"mxfp8", 3, 8, 32, 20, -1, 0, false},
                                           {"fp32", 4, 32, 0, -1, -1, 0, false},
                                           {"fp16", 5, 16, 0, -1, -1, 0, false},
                                           {"bf16", 6, 16, 0, -1, -1, 0, false}};
  return all;
}

// [experts][n rows] over k columns; every buffer is of the exact size. perm, when asked for, is a random
// order with one gap (-1).
class PackedWeight {
 public:
  PackedWeight(const Packing& p, int64_t experts, int64_t n, int64_t k, bool ordered, Numbers& numbers)
      : p(p),
        ordered(ordered),
        experts(experts),
        n(n),
        k(k),
        columns(width_of(p, k, ordered)),
        group(p.group ? p.group : columns),
        groups(columns / group),
        blocks((n + 15) / 16),
        codes(experts * blocks * 16 * columns * p.bits / 8),
        scales(count() * bytes(p.scale_type)),
        zeros(count() * bytes(p.zero_type)),
        row_scale(p.row_scale ? experts * blocks * 16 : 0),
        perm(ordered ? columns : 0) {
    for (int64_t i = 0; i < experts * blocks * 16 * columns * p.bits / 8; ++i)
      codes.data()[i] = uint8_t(numbers.word());
    if (p.format == 3)  // not e4m3's NaN
      for (int64_t i = 0; i < experts * blocks * 16 * columns; ++i)
        if ((codes.data()[i] & 0x7f) == 0x7f) codes.data()[i] = 0x80;
    for (int64_t i = 0; i < experts * blocks * columns * 16 && p.bits >= 16; ++i) {
      const float v = numbers.eighths();
      if (p.bits == 32) std::memcpy(codes.data() + 4 * i, &v, 4);
      const uint16_t h = p.format == 5 ? Dtype<1>::put(v) : Dtype<2>::put(v);
      if (p.bits == 16) std::memcpy(codes.data() + 2 * i, &h, 2);
    }
    for (int64_t i = 0; i < count(); ++i) {
      put(scales.data(), p.scale_type, i,
          p.scale_type == 20 ? 0.25f * float(1 << numbers.below(4)) : 0.125f * float(1 + numbers.below(7)));
      put(zeros.data(), p.zero_type, i, float(p.bits == 4 ? numbers.below(16) : numbers.below(256)));
    }
    for (int64_t i = 0; p.row_scale && i < experts * blocks * 16; ++i)
      row_scale.data()[i] = 0.5f * float(1 + numbers.below(4));
    for (int64_t c = 0; ordered && c < columns; ++c) perm.data()[c] = c < k ? int32_t(c) : -1;
    for (int64_t c = columns - 1; ordered && c > 0; --c)
      std::swap(perm.data()[c], perm.data()[numbers.below(c + 1)]);
  }

  // Element (row, packed column c) of expert e, and the column of x that it meets (-1: none).
  double at(int64_t e, int64_t row, int64_t c) {
    const int per = 32 / p.bits;  // columns of a 32-bit word; a line is one word of each of 16 rows
    const int64_t block = e * blocks + row / 16, lane = row % 16;
    uint32_t word;
    std::memcpy(&word, codes.data() + ((block * (columns / per) + c / per) * 16 + lane) * 4, 4);
    const int64_t place_in_word = c % per;  // of 4-bit codes: byte c % 4, the low nibbles first
    const int64_t shift =
        p.bits == 4 ? place_in_word % 4 * 8 + place_in_word / 4 * 4 : place_in_word * p.bits;
    const uint32_t code = p.bits == 32 ? word : word >> shift & ((1u << p.bits) - 1);
    static const double e2m1[8] = {0, .5, 1, 1.5, 2, 3, 4, 6};
    const int64_t place = (block * groups + c / group) * 16 + lane;
    double value = 0;
    if (p.format == 0 || p.format == 2)
      value = double(code) - (p.zero_type < 0 ? p.implicit_zero : get(zeros.data(), p.zero_type, place));
    else if (p.format == 1)
      value = code & 8 ? -e2m1[code & 7] : e2m1[code];
    else if (p.format == 3)
      value = e4m3(uint8_t(code));
    else if (p.format == 4)
      value = Dtype<2>::get(uint16_t(word >> 16));  // eighths fit the upper half
    else
      value = p.format == 5 ? Dtype<1>::get(uint16_t(code)) : Dtype<2>::get(uint16_t(code));
    if (p.scale_type >= 0) value *= get(scales.data(), p.scale_type, place);
    return p.row_scale ? value * row_scale.data()[block * 16 + lane] : value;
  }
  // Its tensors, as the structs of calls have them.
  void into(const void** tensors, int64_t* size, int64_t* type) {
    const int64_t rows = experts * blocks * 16;
    const void* all[] = {codes.data(), scales.data(), zeros.data(), row_scale.data(), perm.data()};
    const int64_t sizes[] = {rows * columns * p.bits / 8, count(), p.zero_type < 0 ? 0 : count(),
                             p.row_scale ? rows : 0, ordered ? columns : 0};
    const int64_t types[] = {6, p.scale_type == 20 ? 6 : p.scale_type, p.zero_type, 0, 7};
    for (int i = 0; i < 5; ++i) tensors[i] = all[i], size[i] = sizes[i], type[i] = types[i];
  }
  Rows16Options options() const {
    return {p.format, 32 / p.bits, p.group, p.implicit_zero, p.scale_type == 20};
  }
  int64_t source(int64_t c) { return ordered ? perm.data()[c] : c < k ? c : -1; }

  const Packing p;
  const bool ordered;
  const int64_t experts, n, k, columns, group, groups, blocks;
  Buffer<uint8_t> codes, scales, zeros;
  Buffer<float> row_scale;
  Buffer<int32_t> perm;

 private:
  static int64_t width_of(const Packing& p, int64_t k, bool ordered) {
    const int64_t unit = p.group ? p.group : 32;
    return (k + ordered + unit - 1) / unit * unit;
  }
  int64_t count() const { return p.scale_type < 0 ? 0 : experts * blocks * groups * 16; }
  static int64_t bytes(int type) { return type < 0 ? 0 : type == 0 ? 4 : type <= 2 ? 2 : 1; }
  static void put(uint8_t* base, int type, int64_t i, float v) {
    if (type == 0) std::memcpy(base + 4 * i, &v, 4);
    const uint16_t h = type == 1 ? Dtype<1>::put(v) : Dtype<2>::put(v);
    if (type == 1 || type == 2) std::memcpy(base + 2 * i, &h, 2);
    if (type == 6) base[i] = uint8_t(v);
    if (type == 20) base[i] = uint8_t(127 + std::ilogb(v));
    if (type == 3)
      for (int code = 0; code < 127; ++code)
        if (e4m3(uint8_t(code)) == v) base[i] = uint8_t(code);
  }
  static double get(const uint8_t* base, int type, int64_t i) {
    if (type == 6) return base[i];
    if (type == 20) return std::ldexp(1.0, base[i] - 127);
    if (type == 3) return e4m3(base[i]);
    uint16_t h;
    float v;
    std::memcpy(&h, base + 2 * i * (type != 0), 2);
    std::memcpy(&v, base + (type == 0 ? 4 * i : 0), type == 0 ? 4 : 0);
    return type == 0 ? v : type == 1 ? Dtype<1>::get(h) : Dtype<2>::get(h);
  }
};
