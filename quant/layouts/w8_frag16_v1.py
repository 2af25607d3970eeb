"""``w8_frag16_v1``: 8-bit weights in tiles of 16 rows x 128 columns, in the fragment order of 16-row matrix instructions.

A tile is 2048 bytes of codes, then the 16 rows' scales: for g = 0..7 that of row g, then of row g + 8 (of int8 in groups of 32, as in
w4_frag16_v1, for each of the four groups). A scale of a whole row (or of the tensor, or of a 128 x 128 block) is stored again for every
row and tile.

int8: two tiles of w4_frag16_v1, the low nibbles of the (offset binary) codes, then the high nibbles; scales of 16 bits.

fp8: byte 512 * v + 16 * lane + 4 * (2 * (s % 2) + j) starts the word of lane = 4 g + t for columns 16 s + 8 j + 2 t and the one after,
v = s // 2. Row g: sign at bit 15, the other bits at 10..4. Row g + 8: sign at 11, the upper three exponent bits at 14..12, the others
at 3..0. The odd column's are 16 bits further. Scales are float32.

Blocks of tiles and the slots are those of w4_frag16_v1. Refused: float32 scales of int8; NaN codes of fp8.
"""

from __future__ import annotations

from gristmill.kernel_registry.layout import Layout
from gristmill.quant.layouts.w4_frag16_v1 import size

LAYOUT = Layout(
    name="w8_frag16_v1",
    summary="tiles of 16 rows x 128 columns of 8-bit codes in matrix-fragment order, beside their scales",
    slots=("tiles", "scale_type", "perm"),
    schemes=("int8_ch", "int8_g32", "int8_g128", "fp8", "fp8_ch", "fp8_block"),
    pack="gristmill.quant.layouts._frag16:pack_w8",
    unpack="gristmill.quant.layouts._frag16:unpack",
    size=size,
)
