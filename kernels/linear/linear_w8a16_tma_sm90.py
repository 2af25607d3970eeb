"""Weight-only linear of 8-bit weights in CUDA C++ for Hopper at M > 16 (`_linear_frag16_tma_sm90.cuh`), over frag16 tiles.

int8 in groups of 128 or a row, as two planes of nibbles; FP8 (E4M3) under a scale of the tensor, of a row or of a 128 x 128 block.
As linear_w4a16_tma_sm90 in everything else.
"""

from __future__ import annotations

from gristmill.kernels.linear._frag16_kernel import MANY, kernel

KERNEL = kernel(
    "linear_w8a16_tma_sm90",
    MANY,
    8,
    ("w8_frag16_v1",),
)
