// AWQ's words to a bit stream along K: each 32-bit word has the codes of one k for eight rows, so that 8
// words are transposed by nibbles.
// gm-levels: base neon
#include "args.h"
#include "gm_cpu.h"

namespace {

constexpr int64_t kColumns = 16, kWords = 16;  // of a tile: words along N, and words of the result along K
constexpr int kRow[8] = {0, 2, 4, 6, 1, 3, 5, 7};  // the row of each nibble of a word

// Swaps the high part of `low` and the low part of `high`, the parts being `shift` bits wide, for all columns
// of a tile.
inline void swap_parts(uint32_t* low, uint32_t* high, int shift, uint32_t mask) {
  for (int64_t c = 0; c < kColumns; ++c) {
    const uint32_t moved = ((low[c] >> shift) ^ high[c]) & mask;
    high[c] ^= moved;
    low[c] ^= moved << shift;
  }
}

// Nibble i of word j <-> nibble j of word i.
inline void transpose(uint32_t (&v)[8][kColumns]) {
  for (int i = 0; i < 8; i += 2) swap_parts(v[i], v[i + 1], 4, 0x0F0F0F0Fu);
  for (int i = 0; i < 8; ++i)
    if (!(i & 2)) swap_parts(v[i], v[i + 2], 8, 0x00FF00FFu);
  for (int i = 0; i < 4; ++i) swap_parts(v[i], v[i + 4], 16, 0x0000FFFFu);
}

// `columns` words along N and `words` words of the result along K, from and to their first ones.
void tile(const uint32_t* from, int64_t row_words, int64_t columns, int64_t words, uint8_t* to,
          int64_t row_bytes) {
  uint32_t rows[8][kColumns][kWords];
  for (int64_t w = 0; w < words; ++w) {
    uint32_t v[8][kColumns] = {};
    for (int64_t j = 0; j < 8; ++j)
      std::memcpy(v[j], from + (8 * w + j) * row_words, static_cast<size_t>(4 * columns));
    transpose(v);
    for (int r = 0; r < 8; ++r)
      for (int64_t c = 0; c < columns; ++c) rows[r][c][w] = v[r][c];
  }
  for (int64_t c = 0; c < columns; ++c)
    for (int r = 0; r < 8; ++r)
      std::memcpy(to + (8 * c + kRow[r]) * row_bytes, rows[r][c], static_cast<size_t>(4 * words));
}

}  // namespace

// Words [k, columns], contiguous, -> codes [8 * columns, k / 2 bytes], contiguous. k is a multiple of 8.
GM_CPU_ARGS(gm_awq_rows, GmAwqRowsArgs)(const GmAwqRowsArgs& a) {
  if (a.k < 8 || a.k % 8 || a.columns < 1) return GM_E_SHAPE;
  const int64_t tiles = (a.columns + kColumns - 1) / kColumns, row_bytes = a.k / 2;
  return gm::parallel_for(tiles, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t first = t * kColumns, width = a.columns - first < kColumns ? a.columns - first : kColumns;
      for (int64_t w = 0; w < a.k / 8; w += kWords) {
        const int64_t count = a.k / 8 - w < kWords ? a.k / 8 - w : kWords;
        tile(static_cast<const uint32_t*>(a.words) + 8 * w * a.columns + first, a.columns, width, count,
             static_cast<uint8_t*>(a.codes) + 8 * first * row_bytes + 4 * w, row_bytes);
      }
    }
  });
}
