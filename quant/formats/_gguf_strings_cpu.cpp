// Arrays of strings in the header of a GGUF file: each is its length, 8 bytes little-endian, and its bytes.
// gm-levels: base neon
#include "args.h"
#include "gm_cpu.h"

// Passes over `count` strings from `start` on in the first `size` bytes of `data`. end: the position after
// the last one. out: null, or memory of end - start - 7 * count bytes for the strings, each followed by a 0.
// GM_E_SHAPE: they do not end within the data.
GM_CPU_ARGS(gm_gguf_strings, GmGgufStringsArgs)(const GmGgufStringsArgs& a) {
  const uint8_t* bytes = static_cast<const uint8_t*>(a.data);
  uint8_t* to = static_cast<uint8_t*>(a.out);
  int64_t position = a.start;
  for (int64_t i = 0; i < a.count; ++i) {
    uint64_t length = 0;
    if (a.size - position < 8) return GM_E_SHAPE;
    for (int b = 0; b < 8; ++b) length |= uint64_t{bytes[position + b]} << (8 * b);
    position += 8;
    if (length > static_cast<uint64_t>(a.size - position)) return GM_E_SHAPE;
    if (to != nullptr) {
      std::memcpy(to, bytes + position, length);
      to[length] = 0;
      to += length + 1;
    }
    position += static_cast<int64_t>(length);
  }
  *a.end = position;
  return 0;
}
