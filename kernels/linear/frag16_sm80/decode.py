"""The schedule `decode`, M <= 16: which shapes of a CTA there are, and a model that ranks them.

The model has the form of that of the Hopper schedule (frag16_sm90/decode.py): the busiest scheduler, the longest warp, or memory. On an H100
its first choice was the fastest of 16 in six of nine problems, its second in the others (docs/performance/linear_weight_only.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from gristmill.kernel_registry.scheme import cdiv

ROWS = 16
"""Most rows of x."""
MOST_SHARED = 99 << 10
"""Shared memory that a CTA can have on sm_86, sm_89 and sm_120, the least of all targets."""
COUNTER_BYTES = 64 << 10
"""At the start of a workspace: one counter for each block of rows whose sums several CTAs share."""
SPLITS = (1, 2, 4, 8)


class Shape(NamedTuple):
    """A CTA: columns of x in eights, 16-row tiles, warps along K, slots of x, and how many a multiprocessor's registers hold."""

    nt: int
    rt: int
    wk: int
    nx: int
    ctas: int


SHAPES = (
    Shape(1, 1, 8, 3, 3),
    Shape(1, 2, 8, 3, 2),
    Shape(1, 2, 16, 3, 1),
    Shape(1, 4, 8, 3, 2),
    Shape(2, 1, 8, 2, 2),
    Shape(2, 2, 8, 2, 2),
)
"""decode_entry.h has the same."""


def shape_of(nt: int, rt: int, wk: int) -> Shape | None:
    """The shape with this key; None if it is not compiled."""
    return next((shape for shape in SHAPES if shape[:3] == (nt, rt, wk)), None)


def shared_bytes(shape: Shape, m: int) -> int:
    """Dynamic shared memory of a CTA: the slots of x, then in their place the sums of the warps."""
    return max(shape.wk * shape.nx * m * 256, shape.wk * shape.rt * shape.nt * 512)


def workspace_bytes(n: int, nt: int, rt: int, split: int) -> int:
    """Bytes of the counters and of the CTAs' sums; 0 without a split."""
    return COUNTER_BYTES + cdiv(cdiv(n, 16), rt) * split * rt * nt * 512 if split > 1 else 0


def candidates(m: int, n: int, k: int) -> Iterator[tuple[Shape, int]]:
    """(shape, split) for m <= 16 rows of x: no warp is without work because of a split."""
    for shape in SHAPES:
        if shape.nt != (1 if m <= 8 else 2):
            continue
        for split in SPLITS:
            blocks = cdiv(cdiv(n, 16), shape.rt)
            if split == 1 or (cdiv(k, 128) >= split * shape.wk and blocks * 4 <= COUNTER_BYTES):
                yield shape, split


_TILE, _GROUP, _WARP_TILE, _WARP_GROUP, _ROW = 0.035, 0.09, 0.07, 0.1, 0.005
_LAUNCH, _SPLIT, _ROUND, _BYTES = 2.0, 1.5, 1.0, 3.0e6


def microseconds(tile_bytes: int, shape: Shape, split: int, m: int, n: int, k: int, processors: int) -> float:
    """Expected time of one launch on a device with 3 TB/s; only the order of candidates counts."""
    steps = cdiv(cdiv(cdiv(k, 128), split), shape.wk)
    ctas = cdiv(cdiv(n, 16), shape.rt) * split
    rounds = cdiv(ctas, processors * shape.ctas)
    busiest = ceil(ctas / processors)
    work = busiest * shape.wk / 4 * steps * (shape.rt * _TILE * shape.nt**0.5 + _GROUP + _ROW * m)
    latency = rounds * steps * (shape.rt * _WARP_TILE + _WARP_GROUP)
    memory = cdiv(n, 16) * cdiv(k, 128) * tile_bytes / _BYTES
    slowest = float((work**2 + latency**2 + memory**2) ** 0.5)
    return _LAUNCH + slowest + _ROUND * rounds + (_SPLIT if split > 1 else 0.0)


@lru_cache(maxsize=4096)
def ranked(
    tile_bytes: int, m: int, n: int, k: int, processors: int
) -> tuple[tuple[float, dict[str, int]], ...]:
    """(microseconds, configuration) of the candidates, best first."""
    rows = min(max(m, 1), ROWS)
    costs = [
        (
            microseconds(tile_bytes, shape, split, rows, n, k, processors),
            {"nt": shape.nt, "rt": shape.rt, "wk": shape.wk, "split": split},
        )
        for shape, split in candidates(rows, n, k)
    ]
    return tuple(sorted(costs, key=lambda pair: pair[0]))
