"""Weight-only linear of 4-bit weights in CUDA C++ for Hopper at small M (`_linear_w4a16_sm90.cuh`), over frag16 tiles.

int4 in groups of 32, 64, 128 or a row, with or without zero points, act-order included; mxfp4 and nvfp4. Limited by memory at
M <= 4 and by decoding above; docs/performance/linear_weight_only.md has the measurements. The sums of a
cluster's CTAs meet in a fixed order: results are bitwise repeatable, and independent of the other rows of the batch within one
configuration.
"""

from __future__ import annotations

from gristmill.kernels.linear._frag16_kernel import FEW, kernel

KERNEL = kernel(
    "linear_w4a16_sm90",
    FEW,
    4,
    ("w4_frag16_v1", "f4_frag16_v1"),
)
