"""Which operands and shapes of a CTA of `product.cuh` there are, and a model that ranks the shapes.

Its numbers are bounds of an A100 and estimates, not fits: only the order of candidates counts, and tuning measures them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.scheme import BLOCK, cdiv
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


class Operands(NamedTuple):
    """What the codes of W and of x are, and the kernels that multiply them.

    Attributes:
        format: the end of the name of the entry, with the architecture of its PTX.
        schemes: of weights and activations.
        shapes: the instances: GM_SHAPES of the source.
        blocks: whether scales are of 128 x 128 of W and of 128 columns of x.
    """

    format: str
    schemes: tuple[str, ...]
    shapes: tuple[Shape, ...]
    blocks: bool = False

    @property
    def arch(self) -> str:
        """The architecture of the PTX, a number."""
        return self.format.rpartition("_sm")[2]

    def shared_bytes(self, shape: Shape) -> int:
        """Dynamic shared memory of a CTA: the slots, with scales of blocks, which output goes through as well."""
        return shape.slots * (shape.mt + shape.rows) * (shape.columns + (4 if self.blocks else 0))


INT8 = Operands(
    "int8_sm80",
    ("int8_ch.int8_token",),
    (
        Shape(16, 4, 128, 4, 2),
        Shape(32, 4, 128, 4, 2),
        Shape(64, 8, 64, 4, 2),
        Shape(128, 4, 64, 4, 2),
        Shape(128, 8, 64, 4, 1),
    ),
)
INT8_TURING = Operands(
    "int8_sm75",
    INT8.schemes,
    (Shape(16, 4, 128, 2, 1), Shape(32, 4, 64, 2, 3), Shape(64, 4, 64, 2, 2), Shape(64, 8, 64, 2, 1)),
)
FP8 = Operands(
    "fp8_sm89",
    ("fp8_ch.fp8_token", "fp8.fp8_token", "fp8.fp8", "fp8_ch.fp8"),
    (Shape(16, 4, 128, 4, 2), Shape(32, 4, 128, 4, 2), Shape(64, 4, 64, 4, 2), Shape(64, 8, 64, 4, 1)),
)
FP8_BLOCK = Operands(
    "fp8_block_sm89",
    ("fp8_block.fp8_g128",),
    (Shape(16, 4, 128, 4, 2), Shape(32, 4, 128, 4, 2), Shape(64, 4, 64, 3, 2), Shape(64, 8, 64, 4, 1)),
    blocks=True,
)
"""Two levels of sums leave no registers for 128 rows of x."""
OPERANDS = {operands.format: operands for operands in (INT8, INT8_TURING, FP8, FP8_BLOCK)}


def sums_bytes(config: Config) -> int:
    """Bytes of the sums of two tiles per CTA; 0 if no tile is shared."""
    mt, warps, grid, share = (int(config[name]) for name in ("mt", "warps", "grid", "share"))
    return 2 * grid * mt * warps * WARP_ROWS * 4 if share else 0


MAXIMA = 256
"""Parts of x whose largest numbers the quantizer with one scale for all of x finds first. They follow the scale."""


class Room(NamedTuple):
    """Where the parts of a workspace begin, in bytes, and its size. Counters are first, so that no other part leaves them other than zero."""

    sums: int
    codes: int
    scales: int
    maxima: int
    gated: int
    size: int


def pitch_of(m: int) -> int:
    """Floats from the scales of one group of columns of x to those of the next, for M rows."""
    return cdiv(m, 4) * 4


def room_of(config: Config, m: int, k: int, gated: int, given: bool) -> Room:
    """The parts for M rows of x: codes, float32 scales and the maxima before them, unless they are given; gate and up, 16-bit, if they are
    `gated` columns together."""
    codes = scales = maxima = end = COUNTER_BYTES + sums_bytes(config)
    if not given:
        groups = cdiv(k, BLOCK) if OPERANDS[str(config["format"])].blocks else 1
        scales = codes + cdiv(m * k, 16) * 16
        maxima = scales + groups * pitch_of(m) * 4
        end = maxima + (4 * MAXIMA if config["activation"] == "fp8" else 0)
    return Room(COUNTER_BYTES, codes, scales, maxima, end, end + 2 * m * gated)


def candidates(
    operands: Operands, m: int, n: int, k: int, processors: int
) -> Iterator[tuple[Shape, Partition]]:
    """Shapes, and partitions in which every CTA has work."""
    most = max(shape.mt for shape in operands.shapes)
    for shape in operands.shapes:
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
def ranked(
    operands: Operands, m: int, n: int, k: int, processors: int
) -> tuple[tuple[float, dict[str, int]], ...]:
    """(microseconds, configuration) of the candidates, best first; of M = 0 as of M = 1."""
    rows = max(m, 1)
    costs = [
        (
            microseconds(shape, partition, rows, n, k, processors),
            {"mt": shape.mt, "warps": shape.warps, "grid": partition.grid, "share": partition.share},
        )
        for shape, partition in candidates(operands, rows, n, k, processors)
    ]
    return tuple(sorted(costs, key=lambda pair: pair[0]))
