"""Weight-only linear for Hopper at M <= 16, warp-specialised (`decode_ws.cuh`): linear_w4a16_decode_ws_sm90 and
linear_w8a16_decode_ws_sm90.

As linear_decode_sm90, but one warpgroup copies for the others: ahead of it from 9 rows on, and where N is wide; behind it where
the launch is most of the time. docs/performance/linear_weight_only.md has the measurements, and what was tried.
"""

from __future__ import annotations

from gristmill.kernels.linear.frag16_sm90 import decode_ws
from gristmill.kernels.linear.frag16_sm90._kernel import Family, kernel
from gristmill.kernels.linear.frag16_sm90.instances import DECODE_ROWS

DECODE_WS = Family(
    schedule=decode_ws.SCHEDULE,
    ranked=decode_ws.ranked,
    tried=64,
    misfit=decode_ws.misfit,
    rows=DECODE_ROWS,
    summary="M <= 16: a warpgroup copies, {} decoded into tensor-core operands by the others, split-K over clusters",
    priority=109,
)

KERNELS = (
    kernel("linear_w4a16_decode_ws_sm90", DECODE_WS, 4),
    kernel("linear_w8a16_decode_ws_sm90", DECODE_WS, 8),
)
