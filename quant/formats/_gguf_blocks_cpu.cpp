// ggml's blocks of 32 values to codes and scales (gguf_blocks.py has the table): the types that carry most
// files. It is limited by memory, so one level serves every machine of an architecture.
// gm-levels: base neon
#include "args.h"
#include "gm_cpu.h"

namespace {

constexpr int64_t kValues = 32;

// Low nibbles of 8 bytes, or high ones with shift = 4, as a stream: two codes in each of 4 bytes.
inline uint32_t stream_of(uint64_t bytes, int shift) {
  uint64_t codes = (bytes >> shift) & 0x0F0F0F0F0F0F0F0Full;
  codes = (codes | (codes >> 4)) & 0x00FF00FF00FF00FFull;
  codes = (codes | (codes >> 8)) & 0x0000FFFF0000FFFFull;
  return static_cast<uint32_t>(codes | (codes >> 16));
}

// 16 bytes, value i in the low nibble of byte i and value 16 + i in its high one -> a stream of 32 codes.
inline void nibbles(const uint8_t* from, uint8_t* to) {
  uint64_t bytes[2];
  std::memcpy(bytes, from, 16);
  const uint32_t stream[4] = {stream_of(bytes[0], 0), stream_of(bytes[1], 0), stream_of(bytes[0], 4),
                              stream_of(bytes[1], 4)};
  std::memcpy(to, stream, 16);
}

// Signed bytes to offset binary.
inline void flipped(const uint8_t* from, uint8_t* to) {
  for (int i = 0; i < kValues; ++i) to[i] = from[i] ^ 0x80;
}

template <int kScaleBytes, int kCodeBytes, void kCodes(const uint8_t*, uint8_t*)>
int split(const uint8_t* from, int64_t blocks, uint8_t* codes, uint8_t* scales) {
  return gm::parallel_for(blocks, 1 << 14, [=](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const uint8_t* block = from + b * (kScaleBytes + kCodeBytes);
      std::memcpy(scales + b * kScaleBytes, block, kScaleBytes);
      kCodes(block + kScaleBytes, codes + b * kCodeBytes);
    }
  });
}

}  // namespace

// Blocks of a type, by ggml's number of it, -> codes as a bit stream and scales,
// both contiguous. GM_E_DTYPE: another type.
GM_CPU_ARGS(gm_gguf_blocks, GmGgufBlocksArgs)(const GmGgufBlocksArgs& a) {
  const uint8_t* in = static_cast<const uint8_t*>(a.data);
  uint8_t *out = static_cast<uint8_t*>(a.codes), *factors = static_cast<uint8_t*>(a.scales);
  if (a.blocks < 1) return GM_E_SHAPE;
  switch (a.type) {
    case 2:  // Q4_0
      return split<2, 16, nibbles>(in, a.blocks, out, factors);
    case 8:  // Q8_0
      return split<2, 32, flipped>(in, a.blocks, out, factors);
    case 39:  // MXFP4
      return split<1, 16, nibbles>(in, a.blocks, out, factors);
    default:
      return GM_E_DTYPE;
  }
}
