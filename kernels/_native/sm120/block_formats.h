// Number formats of operands with a scale per group of columns, as mma.sync with .block_scale takes them (PTX ISA, "block scaling"; values
// by OCP Microscaling Formats v1.0, and NVFP4).
#pragma once

namespace gm {

// kBits: of a code.  kGroup: columns under one scale.  kUnit: columns of one instruction.
struct Nvfp4 {  // e2m1, scales e4m3
  static constexpr int kBits = 4, kGroup = 16, kUnit = 64;
};
struct Mxfp4 {  // e2m1, scales e8m0
  static constexpr int kBits = 4, kGroup = 32, kUnit = 64;
};
struct Mxfp8 {  // e4m3, scales e8m0
  static constexpr int kBits = 8, kGroup = 32, kUnit = 32;
};

// A slot of 128 columns of a row: bytes of codes and of scales; instructions that multiply it; scales of one of these.
template <typename Format>
struct BlockSlot {
  static constexpr int kColumns = 128, kBytes = kColumns * Format::kBits / 8,
                       kScales = kColumns / Format::kGroup, kSteps = kColumns / Format::kUnit,
                       kStepScales = Format::kUnit / Format::kGroup, kWords = kScales / 4;
};

}  // namespace gm
