// Written by `make generate` from args.py, which declares these structs; do not edit.
#pragma once
#include <cstdint>

// The arguments of gm_gguf_blocks: blocks of a GGUF type -> codes and scales.
struct GmGgufBlocksArgs {
  static constexpr uint64_t kDigest = 0x4189ae1c04e9893e;
  const void* data;
  int64_t blocks;
  // 2 Q4_0, 8 Q8_0, 39 MXFP4
  int32_t type;
  void* codes;
  void* scales;
};

// The arguments of gm_awq_rows: words [k, columns] in AWQ's order -> a bit stream along k, [8 * columns, k
// / 2] bytes.
struct GmAwqRowsArgs {
  static constexpr uint64_t kDigest = 0x46aefc826118b8b8;
  const void* words;
  int64_t k, columns;
  void* codes;
};

// The arguments of gm_gguf_strings: `count` strings of a GGUF file, each behind its length in 8 bytes.
struct GmGgufStringsArgs {
  static constexpr uint64_t kDigest = 0x6120c56f582aefe9;
  const void* data;
  // of data, in bytes
  int64_t size;
  // of the first string
  int64_t start;
  int64_t count;
  // the strings, a 0 after each; null: they are skipped
  void* out;
  // where they end
  int64_t* end;
};
