"""Weight-only linear of 4-bit weights in CUDA C++ for Hopper at small M, warp-specialised (`_linear_frag16_fed_sm90.cuh`), over frag16
tiles.

As linear_w4a16_sm90, but one warpgroup copies for the others: ahead of it from 9 rows on, and where N is wide; behind it where the launch
is most of the time. docs/performance/linear_weight_only.md has the measurements.
"""

from __future__ import annotations

from gristmill.kernels.linear._frag16_kernel import FED, kernel

KERNEL = kernel(
    "linear_w4a16_fed_sm90",
    FED,
    4,
    ("w4_frag16_v1", "f4_frag16_v1"),
)
