// The tile of the frag16 layouts (quant/layouts/w4_frag16_v1.py): 16 rows of W by 128 columns, codes in the
// order of the A operand, then scales.
#pragma once

namespace gm {

constexpr int kTileRows = 16, kTileK = 128;
constexpr int kCodeBytes = kTileRows * kTileK / 2;  // of 4-bit codes, or of one plane of 8-bit ones

}  // namespace gm
