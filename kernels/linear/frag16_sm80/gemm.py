"""The schedule `gemm`, for any number of rows: which shapes of a CTA there are, and a model that ranks them.

Its numbers are bounds of an A100 and estimates, not fits: only the order of candidates counts, and tuning measures them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernels.linear.frag16_sm80.formats import Format

MOST_SHARED = 99 << 10
"""Shared memory that a CTA can have on sm_86, sm_89 and sm_120, the least of all targets."""
COUNTER_BYTES = 64 << 10
"""At the start of a workspace: one counter for each tile of y that CTAs share, fewer than CTAs."""
WARP_ROWS = 32
"""Rows of W per warp."""


class Shape(NamedTuple):
    """A CTA: rows of x, warps, slots of x (64 k) and of weights (128 k), how many a multiprocessor's registers hold, and the microseconds
    that a multiprocessor of an A100 takes for a group of 128 k of it."""

    mt: int
    warps: int
    nx: int
    nw: int
    ctas: int
    group: float

    @property
    def rows(self) -> int:
        """Rows of W."""
        return self.warps * WARP_ROWS


SHAPES = {
    "small": (
        Shape(32, 8, 5, 3, 2, 1.0),
        Shape(64, 4, 5, 3, 2, 0.95),
        Shape(64, 8, 4, 3, 1, 1.8),
        Shape(128, 8, 3, 2, 1, 3.4),
    ),
    "large": (
        Shape(32, 8, 3, 2, 2, 1.0),
        Shape(64, 4, 3, 2, 2, 0.95),
        Shape(64, 8, 3, 2, 1, 1.8),
        Shape(128, 8, 2, 2, 1, 3.4),
    ),
}
"""By size of the tiles; gemm_entry.h has the same, but for the times."""
SMALL_TILE = 1280
"""Bytes of the largest of the small tiles."""


def shared_bytes(shape: Shape, form: Format) -> int:
    """Dynamic shared memory of a CTA: the slots of x and of weights, which output goes through as well."""
    return shape.nx * shape.mt * 128 + shape.warps * shape.nw * WARP_ROWS // 16 * form.tile_bytes


def shapes_of(form: Format) -> tuple[Shape, ...]:
    """The shapes that are compiled for a format: those that fit into shared memory, of which 1 KiB is the system's."""
    shapes = SHAPES["small" if form.tile_bytes <= SMALL_TILE else "large"]
    return tuple(shape for shape in shapes if shared_bytes(shape, form) + 1024 <= MOST_SHARED)


def shape_of(form: Format, mt: int, warps: int) -> Shape | None:
    """The shape with this key; None if it is not compiled."""
    return next((shape for shape in shapes_of(form) if shape[:2] == (mt, warps)), None)


def workspace_of(config: Config) -> int:
    """Bytes of the counters and of the sums of two tiles per CTA; 0 if no tile is shared."""
    mt, warps, grid, share = (int(config[name]) for name in ("mt", "warps", "grid", "share"))
    return COUNTER_BYTES + 2 * grid * mt * warps * WARP_ROWS * 4 if share else 0


class Partition(NamedTuple):
    """CTAs; whether they share the tiles that do not fill a wave along K (stream-K)."""

    grid: int
    share: int


def candidates(form: Format, m: int, n: int, k: int, processors: int) -> Iterator[tuple[Shape, Partition]]:
    """Shapes, and partitions in which every CTA has work."""
    shapes = shapes_of(form)
    most = max(shape.mt for shape in shapes)
    for shape in shapes:
        if shape.mt > 32 and shape.mt // 2 >= m:
            continue  # half the rows suffice
        if shape.mt * 4 < m and shape.mt < most:
            continue  # weights would be decoded too often
        tiles, groups = cdiv(m, shape.mt) * cdiv(n, shape.rows), cdiv(k, 128)
        grids = sorted({min(processors * ctas, tiles * groups) for ctas in range(1, shape.ctas + 1)})
        yield shape, Partition(min(grids[-1], tiles), 0)
        for grid in grids:
            if tiles % grid and tiles % grid * groups >= grid and grid * 4 <= COUNTER_BYTES:
                yield shape, Partition(grid, 1)


_LAUNCH, _MEET, _PART, _FILL, _BYTES, _ALONE = 3.0, 1.5, 0.4, 1.0, 1.5e6, 0.6


def microseconds(
    form: Format, shape: Shape, partition: Partition, m: int, n: int, k: int, processors: int
) -> float:
    """Expected time of one launch: the busiest multiprocessor or memory, then what filling pipelines and adding parts costs."""
    tiles, groups = cdiv(m, shape.mt) * cdiv(n, shape.rows), cdiv(k, 128)
    grid, share = partition
    rest = tiles % grid if share else 0
    chain = cdiv(tiles - rest, grid) * groups + cdiv(rest * groups, grid)  # groups of a CTA
    resident = cdiv(grid, processors)
    # CTAs that are alone on their multiprocessor do not fill it.
    work = chain * max(resident * shape.group, _ALONE * shape.ctas * shape.group)
    memory = (cdiv(n, 16) * groups * form.tile_bytes + 2 * m * (n + k)) / _BYTES
    fills = _FILL * (cdiv(tiles - rest, grid) + (1 if rest else 0))
    sharers = grid / rest if rest else 0.0
    meeting = _MEET + _PART * sharers * shape.mt / 64 if rest else 0.0
    return float((work**3 + memory**3) ** (1 / 3) + _LAUNCH + fills + meeting)


@lru_cache(maxsize=4096)
def ranked(form: Format, m: int, n: int, k: int, processors: int) -> tuple[tuple[float, dict[str, int]], ...]:
    """(microseconds, configuration) of the candidates, best first."""
    rows = max(m, 1)
    costs = [
        (
            microseconds(form, shape, partition, rows, n, k, processors),
            {"mt": shape.mt, "warps": shape.warps, **partition._asdict()},
        )
        for shape, partition in candidates(form, rows, n, k, processors)
    ]
    return tuple(sorted(costs, key=lambda pair: pair[0]))
