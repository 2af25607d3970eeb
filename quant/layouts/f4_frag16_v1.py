"""``f4_frag16_v1``: NVFP4 and MXFP4 weights in the tiles of w4_frag16_v1, with the bits of a word spread for cheap decoding.

Tiles, blocks of tiles and the place of each 32-bit word are those of w4_frag16_v1. In a word, the sign, the two exponent bits and
the mantissa bit of pair i (row g + 8 (i % 2), column 16 s + 8 (i // 2) + 2 t) are at bits

    i = 0: 15, 8, 7, 6     i = 1: 11, 4, 3, 2     i = 2: 5, 30, 29, 28     i = 3: 1, 26, 25, 0

and those of the column after it 16 bits further, around the word: one rotation and one mask bring a pair to where bf16 has these
bits (two for i = 3). Then one multiplication by the block's scale makes the weight, exactly, up to the row's multiplier.

Scales follow the codes, a byte each. nvfp4, at 1024 + 16 g: for each two steps s of 16 columns, both of row g and both of row
g + 8; a byte is the E4M3 scale as five bits of exponent (bias 21) and three of mantissa, subnormals normalised, 0 as 0. mxfp4, at
1024 + 8 g: the same for each two groups of 32; a byte is 254 less the powers of two below the row's largest scale.

Slots:

- ``tiles`` uint8 [..., bytes]. Rows past N and columns past K hold zeros.
- ``row_scale`` float32 [..., N]: what sums are multiplied by: 256 * global (nvfp4), half the row's largest scale (mxfp4).
- ``perm`` int32, empty.

Refused: negative block scales; scales of 0 over other codes than 0; used groups of an MXFP4 row more than 2^126 apart. fp16
activations take MXFP4 groups at 2^-24 of their row's largest and less with less precision, or as 0.
"""

from __future__ import annotations

from gristmill.kernel_registry.layout import Layout
from gristmill.quant.layouts.w4_frag16_v1 import size

LAYOUT = Layout(
    name="f4_frag16_v1",
    summary="the tiles of w4_frag16_v1 for E2M1 codes, their bits spread for placement by one rotation",
    slots=("tiles", "row_scale", "perm"),
    schemes=("mxfp4", "nvfp4"),
    pack="gristmill.quant.layouts._frag16:pack_f4",
    unpack="gristmill.quant.layouts._frag16:unpack",
    size=size,
)
