"""The schedule `gemm` for sm_75, for any number of rows: which shapes of a CTA there are, and a model that ranks them.

Nothing of it was measured on a Turing GPU. Its numbers are estimates for a T4: only the order of candidates counts, and tuning measures them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernels.linear.frag16_sm80.formats import Format
from gristmill.kernels.linear.frag16_sm80.gemm import COUNTER_BYTES, SMALL_TILE, WARP_ROWS, Partition


class Shape(NamedTuple):
    """A CTA: rows of x, warps, and how many a multiprocessor's registers and shared memory hold."""

    mt: int
    warps: int
    ctas: int

    @property
    def rows(self) -> int:
        """Rows of W."""
        return self.warps * WARP_ROWS


SHAPES = {
    "small": (Shape(16, 4, 4), Shape(32, 4, 3), Shape(64, 4, 2), Shape(64, 8, 1)),
    "large": (Shape(16, 4, 3), Shape(32, 4, 2), Shape(64, 4, 1), Shape(64, 8, 1)),
}
"""By size of the tiles; gemm_entry.h has the same."""


def shapes_of(form: Format) -> tuple[Shape, ...]:
    """The shapes that are compiled for a format."""
    return SHAPES["small" if form.tile_bytes <= SMALL_TILE else "large"]


def shape_of(form: Format, mt: int, warps: int) -> Shape | None:
    """The shape with this key; None if it is not compiled."""
    return next((shape for shape in shapes_of(form) if shape[:2] == (mt, warps)), None)


def shared_bytes(shape: Shape, form: Format) -> int:
    """Dynamic shared memory of a CTA: two slots of x and one of weights, which output goes through as well."""
    return 2 * shape.mt * 128 + shape.warps * WARP_ROWS // 16 * form.tile_bytes


def candidates(form: Format, m: int, n: int, k: int, processors: int) -> Iterator[tuple[Shape, Partition]]:
    """Shapes, and partitions in which every CTA has work."""
    most = max(shape.mt for shape in shapes_of(form))
    for shape in shapes_of(form):
        if shape.mt > 16 and shape.mt // 2 >= m:
            continue  # half the rows suffice
        if shape.mt * 4 < m and shape.mt < most:
            continue  # weights would be decoded too often
        tiles, groups = cdiv(m, shape.mt) * cdiv(n, shape.rows), cdiv(k, 128)
        for ctas in range(shape.ctas, 0, -1):
            grid = min(processors * ctas, tiles * groups)
            if ctas == shape.ctas:
                yield shape, Partition(min(grid, tiles), 0)
            if tiles % grid and tiles % grid * groups >= grid and grid * 4 <= COUNTER_BYTES:
                yield shape, Partition(grid, 1)


_PRODUCT, _WEIGHT, _STEP = 1 / 768e3, 1.0e-5, 0.4
"""Microseconds of a multiprocessor: for a product, for decoding a weight; and what a CTA waits in a group of 128 k."""
_LAUNCH, _MEET, _BYTES = 4.0, 4.0, 2.7e5


def microseconds(
    form: Format, shape: Shape, partition: Partition, m: int, n: int, k: int, processors: int
) -> float:
    """Expected time of one launch: the busiest multiprocessor or memory, then what parts of tiles cost to add."""
    tiles, groups = cdiv(m, shape.mt) * cdiv(n, shape.rows), cdiv(k, 128)
    grid, share = partition
    rest = tiles % grid if share else 0
    chain = cdiv(tiles - rest, grid) * groups + cdiv(rest * groups, grid)  # groups of a CTA
    busy = shape.rows * 128 * (shape.mt * _PRODUCT + _WEIGHT)
    # CTAs on one multiprocessor fill each other's waits.
    work = chain * max(cdiv(grid, processors) * busy, busy + _STEP)
    memory = (cdiv(n, 16) * groups * form.tile_bytes + 2 * m * (n + k)) / _BYTES
    return float((work**3 + memory**3) ** (1 / 3) + _LAUNCH + (_MEET if rest else 0.0))


@lru_cache(maxsize=4096)
def ranked(form: Format, m: int, n: int, k: int, processors: int) -> tuple[tuple[float, dict[str, int]], ...]:
    """(microseconds, configuration) of the candidates, best first."""
    rows = max(m, 1)
    # Different numbers of CTAs may make the same grid.
    tried = dict.fromkeys(candidates(form, rows, n, k, processors))
    costs = {one: microseconds(form, *one, rows, n, k, processors) for one in tried}
    return tuple(
        (costs[shape, part], {"mt": shape.mt, "warps": shape.warps, **part._asdict()})
        for shape, part in sorted(costs, key=costs.__getitem__)
    )
