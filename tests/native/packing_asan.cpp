// gm_rows16_codes, gm_rows16_values, gm_group_factors, gm_awq_rows, gm_gguf_blocks and gm_gguf_strings under
// the sanitizers, against their orders as they are documented: rows and words that are no multiple of a tile,
// rows apart in memory.
#include "asan.h"
#include "quant/formats/args.h"
#include "quant/layouts/args.h"
#include "asan_values.h"

GM_LEVELS(gm_rows16_codes, (const GmRows16CodesArgs&));
GM_LEVELS(gm_group_factors, (const GmGroupFactorsArgs&));
GM_LEVELS(gm_rows16_values, (const GmRows16ValuesArgs&));
GM_LEVELS(gm_gguf_strings, (const GmGgufStringsArgs&));
GM_LEVELS(gm_awq_rows, (const GmAwqRowsArgs&));
GM_LEVELS(gm_gguf_blocks, (const GmGgufBlocksArgs&));

static uint8_t byte_at(int64_t i) { return static_cast<uint8_t>(i * 37 + (i >> 8) * 11 + 5); }
static int nibble(uint8_t byte, int64_t column) { return column % 2 ? byte >> 4 : byte & 15; }

void codes(decltype(gm_rows16_codes_levels[0].call) call, int64_t n, int64_t words, int64_t pad,
           bool nibbles) {
  Buffer<uint8_t> in(n, 4 * words, 4 * (words + pad));
  for (int64_t r = 0; r < n; ++r)
    for (int64_t c = 0; c < 4 * words; ++c) in(r, c) = byte_at(r * 1009 + c);
  const int64_t blocks = (n + 15) / 16;
  Buffer<uint8_t> out(blocks * words * 64);
  CHECK(call({in.data(), 4 * (words + pad), n, words, nibbles, 0x88888888u, out.data()}) == 0);
  for (int64_t row = 0; row < 16 * blocks; ++row)
    for (int64_t w = 0; w < words; ++w)
      for (int64_t j = 0; j < 4; ++j) {
        const uint8_t got = out(0, ((row / 16 * words + w) * 16 + row % 16) * 4 + j);
        uint8_t expected = 0x88;
        if (row < n && !nibbles) expected = in(row, 4 * w + j);
        if (row < n && nibbles) {
          const int64_t low = j, high = 4 + j;  // columns of the word
          expected = static_cast<uint8_t>(nibble(in(row, 4 * w + low / 2), low) |
                                          nibble(in(row, 4 * w + high / 2), high) << 4);
        }
        CHECK(got == expected);
      }
}

template <class T>
void values(decltype(gm_rows16_values_levels[0].call) call, int64_t n, int64_t groups, int64_t pad) {
  Buffer<T> in(n, groups, groups + pad);
  for (int64_t r = 0; r < n; ++r)
    for (int64_t g = 0; g < groups; ++g) in(r, g) = static_cast<T>(r * 257 + g * 3 + 1);
  const int64_t blocks = (n + 15) / 16;
  Buffer<T> out(blocks * groups * 16);
  CHECK(call({in.data(), groups + pad, n, groups, sizeof(T), 0x3C, out.data()}) == 0);
  for (int64_t row = 0; row < 16 * blocks; ++row)
    for (int64_t g = 0; g < groups; ++g)
      CHECK(out(0, (row / 16 * groups + g) * 16 + row % 16) == (row < n ? in(row, g) : T(0x3C)));
}

void blocks_of(decltype(gm_gguf_blocks_levels[0].call) call, int type, int64_t blocks, int scale, int codes) {
  Buffer<uint8_t> in(blocks * (scale + codes)), out(blocks * codes), scales(blocks * scale);
  for (int64_t i = 0; i < blocks * (scale + codes); ++i) in(0, i) = byte_at(i);
  CHECK(call({in.data(), blocks, type, out.data(), scales.data()}) == 0);
  for (int64_t b = 0; b < blocks; ++b) {
    const uint8_t* block = in.data() + b * (scale + codes);
    for (int i = 0; i < scale; ++i) CHECK(scales(0, b * scale + i) == block[i]);
    for (int value = 0; value < 32; ++value) {
      if (codes == 32) {
        CHECK(out(0, b * 32 + value) == (block[scale + value] ^ 0x80));
      } else {
        const int expected = value < 16 ? block[scale + value] & 15 : block[scale + value - 16] >> 4;
        CHECK(nibble(out(0, b * 16 + value / 2), value) == expected);
      }
    }
  }
}

void awq(decltype(gm_awq_rows_levels[0].call) call, int64_t k, int64_t columns) {
  static const int row_of[8] = {0, 2, 4, 6, 1, 3, 5, 7};
  Buffer<uint32_t> in(k * columns);
  for (int64_t i = 0; i < k * columns; ++i) in(0, i) = static_cast<uint32_t>(i * 2654435761u + 12345u);
  Buffer<uint8_t> out(8 * columns * (k / 2));
  CHECK(call({in.data(), k, columns, out.data()}) == 0);
  for (int64_t at = 0; at < k; ++at)
    for (int64_t c = 0; c < columns; ++c)
      for (int i = 0; i < 8; ++i) {
        const int code = in(0, at * columns + c) >> (4 * i) & 15;
        CHECK(nibble(out(0, (8 * c + row_of[i]) * (k / 2) + at / 2), at) == code);
      }
}

// Strings of 0, 3 and 6 bytes after a byte of something else; every truncation is refused, and so is a length
// past all memory.
void strings(decltype(gm_gguf_strings_levels[0].call) call) {
  constexpr int64_t kSize = 1 + 3 * 8 + 9;
  Buffer<uint8_t> in(kSize), out(9 + 3);
  for (int64_t i = 0; i < kSize; ++i) in(0, i) = 0;
  in(0, 9) = 3, in(0, 20) = 6;
  for (int i = 0; i < 3; ++i) in(0, 17 + i) = static_cast<uint8_t>('a' + i);
  for (int i = 0; i < 6; ++i) in(0, 28 + i) = static_cast<uint8_t>('A' + i);
  int64_t end = 0;
  CHECK(call({in.data(), kSize, 1, 3, nullptr, &end}) == 0 && end == kSize);
  CHECK(call({in.data(), kSize, 1, 3, out.data(), &end}) == 0 && end == kSize);
  CHECK(std::memcmp(out.data(), "\0abc\0ABCDEF", 12) == 0);
  for (int64_t size = 1; size < kSize; ++size) CHECK(call({in.data(), size, 1, 3, nullptr, &end}) == -2);
  in(0, 27) = 0xFF;
  CHECK(call({in.data(), kSize, 1, 3, nullptr, &end}) == -2);
}

// Runs of products of a factor and integers are found again; one that is no such product is refused.
void factors(decltype(gm_group_factors_levels[0].call) call, int64_t runs, int64_t per) {
  Numbers numbers;
  Buffer<float> values(runs * per), found(runs);
  Buffer<int8_t> integers(runs * per);
  for (int64_t r = 0; r < runs; ++r) {
    const float factor = float(1 + numbers.below(2047)) / 4194304.0f;
    for (int64_t i = 0; i < per; ++i)
      values.data()[r * per + i] = r == 0 ? 0.0f : factor * float(int(numbers.below(127)) - 63);
  }
  int32_t exact = -1;
  CHECK(call({values.data(), runs, per, found.data(), integers.data(), &exact}) == 0 && exact == 1);
  for (int64_t i = 0; i < runs * per; ++i)
    CHECK(found.data()[i / per] * float(integers.data()[i]) == values.data()[i]);
  for (const float other : {0x1p-25f, 1e30f, -1e30f, __builtin_nanf(""), __builtin_inff(), 0.3f}) {
    values.data()[runs * per - 1] = other;
    CHECK(call({values.data(), runs, per, found.data(), integers.data(), &exact}) == 0 && exact == 0);
  }
}

int main() {
  int ran = 0;
  for (const auto& level : gm_group_factors_levels) {
    if (level.call == nullptr || !runs_here(level.name)) continue;
    for (int64_t runs : {2, 7, 20000}) factors(level.call, runs, 8), factors(level.call, runs, 16);
    CHECK(level.call({nullptr, -1, 8, nullptr, nullptr, nullptr}) == -2);
    ++ran;
  }
  for (const auto& level : gm_rows16_codes_levels) {
    if (level.call == nullptr || !runs_here(level.name)) continue;
    for (int64_t n : {1, 7, 16, 33})
      for (int64_t words : {1, 15, 16, 17, 40})
        for (int64_t pad : {0, 3})
          codes(level.call, n, words, pad, false), codes(level.call, n, words, pad, true);
    CHECK(level.call({nullptr, 4, 0, 1, 0, 0, nullptr}) == -2 &&
          level.call({nullptr, 4, 1, 2, 0, 0, nullptr}) == -2);
    ++ran;
  }
  for (const auto& level : gm_rows16_values_levels) {
    if (level.call == nullptr || !runs_here(level.name)) continue;
    for (int64_t n : {1, 7, 16, 33})
      for (int64_t groups : {1, 3, 32})
        for (int64_t pad : {0, 2}) {
          values<uint8_t>(level.call, n, groups, pad), values<uint16_t>(level.call, n, groups, pad);
          values<uint32_t>(level.call, n, groups, pad);
        }
    CHECK(level.call({nullptr, 1, 1, 1, 8, 0, nullptr}) == -1 &&
          level.call({nullptr, 1, 1, 2, 2, 0, nullptr}) == -2);
    ++ran;
  }
  for (const auto& level : gm_gguf_blocks_levels) {
    if (level.call == nullptr || !runs_here(level.name)) continue;
    for (int64_t blocks : {1, 7, 257}) {
      blocks_of(level.call, 2, blocks, 2, 16), blocks_of(level.call, 8, blocks, 2, 32);
      blocks_of(level.call, 39, blocks, 1, 16);
    }
    CHECK(level.call({nullptr, 1, 12, nullptr, nullptr}) == -1 &&
          level.call({nullptr, 0, 2, nullptr, nullptr}) == -2);
    ++ran;
  }
  for (const auto& level : gm_gguf_strings_levels) {
    if (level.call == nullptr || !runs_here(level.name)) continue;
    strings(level.call);
    ++ran;
  }
  for (const auto& level : gm_awq_rows_levels) {
    if (level.call == nullptr || !runs_here(level.name)) continue;
    for (int64_t k : {8, 128, 136, 264})
      for (int64_t columns : {1, 15, 16, 33}) awq(level.call, k, columns);
    CHECK(level.call({nullptr, 12, 1, nullptr}) == -2 && level.call({nullptr, 8, 0, nullptr}) == -2);
    ++ran;
  }
  CHECK(ran > 0);
  std::printf("packing: %d entries\n", ran);
}
