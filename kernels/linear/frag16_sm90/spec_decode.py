"""Weight-only linear for Hopper at M <= 16 (`decode.cuh`): linear_w4a16_decode_sm90 and linear_w8a16_decode_sm90.

int4 in groups of 32, 64, 128 or a row, with or without zero points, act-order included; mxfp4 and nvfp4; int8 in groups of 128
or a row, as two planes of nibbles; FP8 (E4M3) under a scale of the tensor, of a row or of a 128 x 128 block. Limited by memory at
M <= 4 and by decoding above; docs/performance/linear_weight_only.md has the measurements, and what was tried. The sums of a
cluster's CTAs meet in a fixed order: results are bitwise repeatable, and independent of the other rows of the batch within one
configuration.
"""

from __future__ import annotations

from gristmill.kernels.linear.frag16_sm90 import decode
from gristmill.kernels.linear.frag16_sm90._kernel import Family, kernel
from gristmill.kernels.linear.frag16_sm90.instances import DECODE_ROWS

DECODE = Family(
    schedule=decode.SCHEDULE,
    ranked=decode.ranked,
    tried=64,
    misfit=decode.misfit,
    rows=DECODE_ROWS,
    summary="M <= 16: bulk copies into warps' own rings, {} decoded into tensor-core operands, split-K over clusters",
    priority=110,
)

KERNELS = (kernel("linear_w4a16_decode_sm90", DECODE, 4), kernel("linear_w8a16_decode_sm90", DECODE, 8))
