"""Which shapes of a CTA of `product.cuh` there are, the parts of a workspace, and a model that ranks shapes and partitions.

Its numbers are bounds of an RTX 5090 and estimates, not fits: only the order of candidates counts, and tuning measures them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.scheme import QuantScheme, cdiv
from gristmill.kernels.linear.frag16_sm80.gemm import COUNTER_BYTES, WARP_ROWS, Partition

COLUMNS = 128
"""Of a slot."""
MOST_PARTS = 256
"""Parts of x whose largest magnitudes make the factor of all of x."""


class Shape(NamedTuple):
    """A CTA: rows of x, warps, slots, and how many a multiprocessor's registers hold."""

    mt: int
    warps: int
    slots: int
    ctas: int

    @property
    def rows(self) -> int:
        """Rows of W."""
        return self.warps * WARP_ROWS

    def shared_bytes(self, format: str) -> int:
        """Dynamic shared memory: the slots, which output goes through as well. Scales of x have room for a multiple of 32 rows."""
        scheme = QuantScheme.parse(format)
        codes, scales = scheme.code_bytes(COLUMNS), scheme.groups(COLUMNS)
        return self.slots * ((self.mt + self.rows) * codes + (cdiv(self.mt, 32) * 32 + self.rows) * scales)


_FP4 = (Shape(16, 4, 4, 2), Shape(32, 4, 4, 2), Shape(64, 4, 3, 2), Shape(128, 8, 3, 1))
SHAPES = {
    "nvfp4": _FP4,
    "mxfp4": _FP4,
    "mxfp8": (Shape(16, 4, 4, 1), Shape(32, 4, 3, 1), Shape(64, 8, 2, 1), Shape(128, 4, 2, 1)),
}
"""Format -> the instances: GM_SHAPES of its source."""


class Room(NamedTuple):
    """Where the parts of a workspace begin, in bytes, and its size. Counters are first, so that no other part leaves them other than zero."""

    sums: int
    codes: int
    scales: int
    factor: int
    maxima: int
    gated: int
    size: int


def sums_bytes(config: Config) -> int:
    """Bytes of the sums of two tiles per CTA; 0 if no tile is shared."""
    mt, warps, grid, share = (int(config[name]) for name in ("mt", "warps", "grid", "share"))
    return 2 * grid * mt * warps * WARP_ROWS * 4 if share else 0


def room_of(config: Config, m: int, k: int, gated: int) -> Room:
    """The parts for M rows of x: partial sums, codes and scales, of nvfp4 a factor and maxima, and `gated` columns of gate and up, 16-bit."""
    scheme = QuantScheme.parse(str(config["format"]))
    sizes = (
        COUNTER_BYTES,
        sums_bytes(config),
        m * scheme.code_bytes(k),
        m * scheme.groups(k),
        4 if scheme.has_global else 0,
        4 * MOST_PARTS if scheme.has_global else 0,
        2 * m * gated,
    )
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + cdiv(size, 16) * 16)
    return Room(*starts[1:])


def candidates(format: str, m: int, n: int, k: int, processors: int) -> Iterator[tuple[Shape, Partition]]:
    """Shapes, and partitions in which every CTA has work."""
    shapes, slots = SHAPES[format], cdiv(k, COLUMNS)
    for shape in shapes:
        too_tall = shape.mt > 16 and shape.mt // 2 >= m
        too_low = shape.mt * 4 < m and shape is not shapes[-1]  # weights would be read too often
        if too_tall or too_low:
            continue
        tiles = cdiv(m, shape.mt) * cdiv(n, shape.rows)
        grids = sorted({min(processors * ctas, tiles * slots) for ctas in range(1, shape.ctas + 1)})
        yield shape, Partition(min(grids[-1], tiles), 0)
        for grid in grids:
            if tiles % grid and tiles % grid * slots >= grid and grid * 4 <= COUNTER_BYTES:
                yield shape, Partition(grid, 1)


_PRODUCTS = {4: 4.9e6, 8: 2.4e6}
"""Bits -> products of a multiprocessor per microsecond."""
_SLOT, _LAUNCH, _MEET, _PART, _FILL, _BYTES, _ALONE = 0.05, 3.0, 1.5, 0.2, 1.0, 1.8e6, 0.6
_STREAM = 3.2e4
"""Bytes per microsecond that one CTA reads at most: three times a multiprocessor's share of the memory's bandwidth."""


def microseconds(
    format: str, shape: Shape, partition: Partition, m: int, n: int, k: int, processors: int
) -> float:
    """Expected time of one launch: the busiest multiprocessor or memory, then what filling pipelines and adding parts costs."""
    bits, slots = QuantScheme.parse(format).bits, cdiv(k, COLUMNS)
    tiles = cdiv(m, shape.mt) * cdiv(n, shape.rows)
    grid, share = partition
    shared = tiles % grid if share else 0
    whole = cdiv(tiles - shared, grid)
    of_slot = shape.mt * shape.rows * COLUMNS / _PRODUCTS[bits] + _SLOT
    # CTAs that are alone on their multiprocessor do not fill it.
    busy = of_slot * max(cdiv(grid, processors), _ALONE * shape.ctas)
    longest = whole * slots + cdiv(shared * slots, grid)
    work = longest * busy
    memory = ((n + m) * k * bits / 8 + 2 * m * n) / _BYTES
    memory = max(memory, longest * (shape.mt + shape.rows) * COLUMNS * bits / 8 / _STREAM)
    time = float((work**3 + memory**3) ** (1 / 3)) + _LAUNCH + _FILL * whole
    return time + (_FILL + _MEET + _PART * grid / shared * shape.mt / 64 if shared else 0.0)


@lru_cache(maxsize=4096)
def ranked(
    format: str, m: int, n: int, k: int, processors: int
) -> tuple[tuple[float, dict[str, int | str]], ...]:
    """(microseconds, configuration) of the candidates, best first; of M = 0 as of M = 1."""
    rows = max(m, 1)
    costs = []
    for shape, partition in candidates(format, rows, n, k, processors):
        config: dict[str, int | str] = {"format": format, "mt": shape.mt, "warps": shape.warps}
        config |= {"grid": partition.grid, "share": partition.share}
        costs.append((microseconds(format, shape, partition, rows, n, k, processors), config))
    return tuple(sorted(costs, key=lambda pair: pair[0]))
