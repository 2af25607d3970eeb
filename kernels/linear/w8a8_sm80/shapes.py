"""Which shapes of a CTA of `product.cuh` there are, and a model that ranks them.

Its numbers are bounds of an A100 and estimates, not fits: only the order of candidates counts, and tuning measures them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernels.linear.frag16_sm80.gemm import COUNTER_BYTES, WARP_ROWS, Partition


class Shape(NamedTuple):
    """A CTA: rows of x, warps, columns of a slot, slots, and how many a multiprocessor's registers hold."""

    mt: int
    warps: int
    columns: int
    slots: int
    ctas: int

    @property
    def rows(self) -> int:
        """Rows of W."""
        return self.warps * WARP_ROWS

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: the slots, which output goes through as well."""
        return self.slots * (self.mt + self.rows) * self.columns


SHAPES = (
    Shape(16, 4, 128, 4, 2),
    Shape(32, 4, 128, 4, 2),
    Shape(64, 8, 64, 4, 2),
    Shape(128, 4, 64, 4, 2),
    Shape(128, 8, 64, 4, 1),
)
"""The instances: GM_SHAPES of _linear_w8a8_sm80.cu."""


def sums_bytes(config: Config) -> int:
    """Bytes of the sums of two tiles per CTA; 0 if no tile is shared."""
    mt, warps, grid, share = (int(config[name]) for name in ("mt", "warps", "grid", "share"))
    return 2 * grid * mt * warps * WARP_ROWS * 4 if share else 0


class Room(NamedTuple):
    """Where the parts of a workspace begin, in bytes, and its size. Counters are first, so that no other part leaves them other than zero."""

    sums: int
    codes: int
    scales: int
    gated: int
    size: int


def room_of(config: Config, m: int, k: int, gated: int, given: bool) -> Room:
    """The parts for M rows of x: codes and float32 scales unless they are given; gate and up, 16-bit, if they are `gated` columns together."""
    codes = COUNTER_BYTES + sums_bytes(config)
    scales = codes + (0 if given else cdiv(m * k, 16) * 16)
    end = scales + (0 if given else cdiv(m, 4) * 16)
    return Room(COUNTER_BYTES, codes, scales, end, end + 2 * m * gated)


def candidates(m: int, n: int, k: int, processors: int) -> Iterator[tuple[Shape, Partition]]:
    """Shapes, and partitions in which every CTA has work."""
    most = max(shape.mt for shape in SHAPES)
    for shape in SHAPES:
        if shape.mt > 16 and shape.mt // 2 >= m:
            continue  # half the rows suffice
        if shape.mt * 4 < m and shape.mt < most:
            continue  # weights would be read too often
        tiles, slots = cdiv(m, shape.mt) * cdiv(n, shape.rows), cdiv(k, shape.columns)
        grids = sorted({min(processors * ctas, tiles * slots) for ctas in range(1, shape.ctas + 1)})
        yield shape, Partition(min(grids[-1], tiles), 0)
        for grid in grids:
            if tiles % grid and tiles % grid * slots >= grid and grid * 4 <= COUNTER_BYTES:
                yield shape, Partition(grid, 1)


_PRODUCTS, _SLOT = 1.9e6, 0.05
_LAUNCH, _MEET, _PART, _FILL, _BYTES, _ALONE = 3.0, 1.5, 0.2, 1.0, 1.5e6, 0.6


def microseconds(shape: Shape, partition: Partition, m: int, n: int, k: int, processors: int) -> float:
    """Expected time of one launch: the busiest multiprocessor or memory, then what filling pipelines and adding parts costs."""
    tiles, slots = cdiv(m, shape.mt) * cdiv(n, shape.rows), cdiv(k, shape.columns)
    grid, share = partition
    rest = tiles % grid if share else 0
    whole = cdiv(tiles - rest, grid)
    resident, busy = cdiv(grid, processors), shape.mt * shape.rows * shape.columns / _PRODUCTS + _SLOT
    # CTAs that are alone on their multiprocessor do not fill it.
    work = (whole * slots + cdiv(rest * slots, grid)) * busy * max(resident, _ALONE * shape.ctas)
    memory = (n * k + m * k + 2 * m * n) / _BYTES
    time = float((work**3 + memory**3) ** (1 / 3)) + _LAUNCH + _FILL * whole
    return time + (_FILL + _MEET + _PART * grid / rest * shape.mt / 64 if rest else 0.0)


@lru_cache(maxsize=4096)
def ranked(m: int, n: int, k: int, processors: int) -> tuple[tuple[float, dict[str, int]], ...]:
    """(microseconds, configuration) of the candidates, best first; of M = 0 as of M = 1."""
    rows = max(m, 1)
    costs = [
        (
            microseconds(shape, partition, rows, n, k, processors),
            {"mt": shape.mt, "warps": shape.warps, "grid": partition.grid, "share": partition.share},
        )
        for shape, partition in candidates(rows, n, k, processors)
    ]
    return tuple(sorted(costs, key=lambda pair: pair[0]))
