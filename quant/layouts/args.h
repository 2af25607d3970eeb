// Written by `make generate` from args.py, which declares these structs; do not edit.
#pragma once
#include <cstdint>

// The arguments of gm_rows16_codes: codes in rows [n, 4 * words bytes] -> [ceil(n / 16), words, 64 bytes].
struct GmRows16CodesArgs {
  static constexpr uint64_t kDigest = 0x1ec11d169b691a7;
  const void* rows;
  // from one row to the next
  int64_t row_bytes;
  int64_t n, words;
  // codes have 4 bits, columns in order from the low nibble
  int32_t nibbles;
  // the word of rows from n on
  uint32_t padding;
  void* packed;
};

// The arguments of gm_rows16_values: values in rows [n, groups], of 1, 2 or 4 bytes, -> [ceil(n / 16),
// groups, 16].
struct GmRows16ValuesArgs {
  static constexpr uint64_t kDigest = 0x4d9208a61f8897a5;
  const void* rows;
  // from one row to the next
  int64_t row_values;
  int64_t n, groups;
  int32_t bytes;
  // the bits of rows from n on
  uint32_t padding;
  void* packed;
};

// The arguments of gm_group_factors: float32 values [runs, per] as int8 integers times a factor of each
// run.
struct GmGroupFactorsArgs {
  static constexpr uint64_t kDigest = 0x398068afedf87602;
  const float* values;
  int64_t runs, per;
  // [runs]
  float* factors;
  // [runs, per]
  int8_t* integers;
  // 1 if the products are the values, bit for bit
  int32_t* exact;
};
