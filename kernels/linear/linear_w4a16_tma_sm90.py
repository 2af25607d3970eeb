"""Weight-only linear of 4-bit weights in CUDA C++ for Hopper at M > 16 (`_linear_frag16_tma_sm90.cuh`), over frag16 tiles.

Warp-specialised: two threads copy, the other warpgroups decode weights into wgmma's register operand. Weights are rounded to x's type
once they are scaled. What does not fill the machine evenly is dealt out along K, its sums added in a fixed order: results are bitwise
repeatable. docs/performance/linear_weight_only.md has the measurements.
"""

from __future__ import annotations

from gristmill.kernels.linear._frag16_kernel import MANY, kernel

KERNEL = kernel(
    "linear_w4a16_tma_sm90",
    MANY,
    4,
    ("w4_frag16_v1", "f4_frag16_v1"),
)
