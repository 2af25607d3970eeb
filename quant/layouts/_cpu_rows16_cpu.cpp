// Packing of cpu_rows16_v1 (cpu_rows16_v1.py describes the order): codes and scales of 16 rows, interleaved.
// It is limited by memory, so one level serves every machine of an architecture.
// gm-levels: base neon
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

// `words` words of 16 rows that are row_bytes apart -> lines of 16 words. Rows from `rows` on are filled with
// `padding`.
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

}  // namespace

// Codes [n, 4 * words bytes], rows row_bytes apart, -> [ceil(n / 16), words, 64 bytes]. nibbles: codes have 4
// bits, columns in order from the low nibble. padding: the word of rows from n on.
GM_KERNEL(gm_rows16_codes)(const void* from, int64_t row_bytes, int64_t n, int64_t words, int nibbles,
                           uint32_t padding, void* to) {
  if (n < 1 || words < 1 || row_bytes < 4 * words) return GM_E_SHAPE;
  const int64_t blocks = (n + kRows - 1) / kRows, grain = 262144 / (words * 64) + 1;
  return gm::parallel_for(blocks, grain, [=](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t rows = n - b * kRows < kRows ? n - b * kRows : kRows;
      const uint8_t* block = static_cast<const uint8_t*>(from) + b * kRows * row_bytes;
      uint32_t* lines = static_cast<uint32_t*>(to) + b * kRows * words;
      if (nibbles) {
        interleave_block<true>(block, row_bytes, rows, words, padding, lines);
      } else {
        interleave_block<false>(block, row_bytes, rows, words, padding, lines);
      }
    }
  });
}

// Values [n, groups] of 1, 2 or 4 bytes, rows row_values apart, -> [ceil(n / 16), groups, 16]. padding: the
// bits of rows from n on.
GM_KERNEL(gm_rows16_values)(const void* from, int64_t row_values, int64_t n, int64_t groups, int bytes,
                            uint32_t padding, void* to) {
  if (n < 1 || groups < 1 || row_values < groups) return GM_E_SHAPE;
  switch (bytes) {
    case 1:
      return pack_values<uint8_t>(from, row_values, n, groups, padding, to);
    case 2:
      return pack_values<uint16_t>(from, row_values, n, groups, padding, to);
    case 4:
      return pack_values<uint32_t>(from, row_values, n, groups, padding, to);
    default:
      return GM_E_DTYPE;
  }
}
