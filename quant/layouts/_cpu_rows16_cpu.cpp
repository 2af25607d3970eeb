// Packing of cpu_rows16_v1 (cpu_rows16_v1.py describes the order): codes and scales of 16 rows, interleaved.
// And the factors of scales for cpu_groups16_v1. It is limited by memory, so one level serves every machine
// of an architecture.
// gm-levels: base neon
#include "args.h"
#include "gm_cpu.h"

namespace {

constexpr int64_t kRows = 16, kTileWords = 16;

// Eight 4-bit columns, in order from the lowest bits -> columns 0-3 in the low nibbles of the bytes, 4-7 in
// the high ones.
inline uint32_t halves_apart(uint32_t word) {
  uint32_t swap = (word ^ (word >> 8)) & 0x0000FF00u;
  word ^= swap ^ (swap << 8);
  swap = (word ^ (word >> 4)) & 0x00F000F0u;
  return word ^ swap ^ (swap << 4);
}

// `words` words of 16 rows that are row_bytes apart -> lines of 16 words.
// Rows from `rows` on are filled with `padding`.
template <bool kNibbles>
void interleave_block(const uint8_t* from, int64_t row_bytes, int64_t rows, int64_t words, uint32_t padding,
                      uint32_t* to) {
  uint32_t tile[kRows][kTileWords];
  for (int64_t r = rows; r < kRows; ++r)
    for (int64_t w = 0; w < kTileWords; ++w) tile[r][w] = padding;
  for (int64_t first = 0; first < words; first += kTileWords) {
    const int64_t count = words - first < kTileWords ? words - first : kTileWords;
    for (int64_t r = 0; r < rows; ++r) {
      if (count == kTileWords) {
        std::memcpy(tile[r], from + r * row_bytes + 4 * first, 4 * kTileWords);
      } else {
        std::memcpy(tile[r], from + r * row_bytes + 4 * first, static_cast<size_t>(4 * count));
      }
    }
    if (kNibbles) {
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t w = 0; w < count; ++w) tile[r][w] = halves_apart(tile[r][w]);
    }
    uint32_t* lines = to + first * kRows;
    for (int64_t w = 0; w < count; ++w)
      for (int64_t r = 0; r < kRows; ++r) lines[w * kRows + r] = tile[r][w];
  }
}

// [rows, groups] -> [groups, 16], for values of the size of T.
template <class T>
void values_block(const T* from, int64_t row_values, int64_t rows, int64_t groups, T padding, T* to) {
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t r = 0; r < rows; ++r) to[g * kRows + r] = from[r * row_values + g];
    for (int64_t r = rows; r < kRows; ++r) to[g * kRows + r] = padding;
  }
}

template <class T>
int pack_values(const void* from, int64_t row_values, int64_t n, int64_t groups, uint32_t padding, void* to) {
  const int64_t blocks = (n + kRows - 1) / kRows, grain = 65536 / (groups * kRows * int64_t(sizeof(T))) + 1;
  return gm::parallel_for(blocks, grain, [=](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t rows = n - b * kRows < kRows ? n - b * kRows : kRows;
      values_block(static_cast<const T*>(from) + b * kRows * row_values, row_values, rows, groups,
                   static_cast<T>(padding), static_cast<T*>(to) + b * kRows * groups);
    }
  });
}

// The greatest common divisor; 0 of zeros.
inline uint64_t divisor_of(uint64_t a, uint64_t b) {
  while (b != 0) {
    const uint64_t rest = a % b;
    a = b, b = rest;
  }
  return a;
}

// Values as int8 times a factor, all of them products of it, bit for bit: false if there is none.
inline bool factor_run(const float* values, int64_t count, float* factor, int8_t* integers) {
  constexpr float kUnits = 16777216.0f;  // every product of a float16 and an integer is a multiple of 2^-24
  uint64_t divisor = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float units = (values[i] < 0 ? -values[i] : values[i]) * kUnits;
    if (!(units < 9.0e15f)) return false;
    const uint64_t whole = static_cast<uint64_t>(units);
    if (static_cast<float>(whole) != units) return false;
    divisor = divisor == 0 ? whole : divisor_of(whole, divisor);
  }
  *factor = static_cast<float>(divisor) / kUnits;
  if (divisor != 0 && static_cast<uint64_t>(*factor * kUnits) != divisor) return false;
  // Q6_K's largest scale is -128 times a float of either sign.
  for (int64_t i = 0; i < count && divisor != 0; ++i)
    if (values[i] / *factor == 128.0f) {
      *factor = -*factor;
      break;
    }
  for (int64_t i = 0; i < count; ++i) {
    const float ratio = divisor == 0 ? 0.0f : values[i] / *factor;
    if (!(ratio >= -128.0f && ratio <= 127.0f)) return false;
    integers[i] = static_cast<int8_t>(ratio);
    if (static_cast<float>(integers[i]) * *factor != values[i]) return false;
  }
  return true;
}

}  // namespace

// Runs of `per` float32 values -> a factor and `per` int8 each. *exact: 1, or 0 if some run is no such
// product, and then what was written does not count.
GM_CPU_ARGS(gm_group_factors, GmGroupFactorsArgs)(const GmGroupFactorsArgs& a) {
  if (a.runs < 0 || a.per < 1) return GM_E_SHAPE;
  int failed = 0;
  const int code = gm::parallel_for(a.runs, 1 << 13, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      if (!factor_run(a.values + i * a.per, a.per, a.factors + i, a.integers + i * a.per)) {
        __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
        return;
      }
  });
  *a.exact = failed ? 0 : 1;
  return code;
}

GM_CPU_ARGS(gm_rows16_codes, GmRows16CodesArgs)(const GmRows16CodesArgs& a) {
  if (a.n < 1 || a.words < 1 || a.row_bytes < 4 * a.words) return GM_E_SHAPE;
  const int64_t blocks = (a.n + kRows - 1) / kRows, grain = 262144 / (a.words * 64) + 1;
  return gm::parallel_for(blocks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t rows = a.n - b * kRows < kRows ? a.n - b * kRows : kRows;
      const uint8_t* block = static_cast<const uint8_t*>(a.rows) + b * kRows * a.row_bytes;
      uint32_t* lines = static_cast<uint32_t*>(a.packed) + b * kRows * a.words;
      if (a.nibbles) {
        interleave_block<true>(block, a.row_bytes, rows, a.words, a.padding, lines);
      } else {
        interleave_block<false>(block, a.row_bytes, rows, a.words, a.padding, lines);
      }
    }
  });
}

GM_CPU_ARGS(gm_rows16_values, GmRows16ValuesArgs)(const GmRows16ValuesArgs& a) {
  if (a.n < 1 || a.groups < 1 || a.row_values < a.groups) return GM_E_SHAPE;
  switch (a.bytes) {
    case 1:
      return pack_values<uint8_t>(a.rows, a.row_values, a.n, a.groups, a.padding, a.packed);
    case 2:
      return pack_values<uint16_t>(a.rows, a.row_values, a.n, a.groups, a.padding, a.packed);
    case 4:
      return pack_values<uint32_t>(a.rows, a.row_values, a.n, a.groups, a.padding, a.packed);
    default:
      return GM_E_DTYPE;
  }
}
