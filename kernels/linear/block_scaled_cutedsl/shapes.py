"""Tiles and workspaces of products of block-scaled codes in CuTe DSL; neither torch nor CuTe DSL is needed here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from gristmill.kernel_registry.scheme import QuantScheme, cdiv
from gristmill.kernels.cutedsl.devices import SHARED_BYTES, TENSOR_COLUMNS

ROWS, GROUPS, TILE_BYTES = 128, 4, 512
"""Rows and groups of a tile of scales, and its bytes (`quant/layouts/scales128x4_v1.py`)."""
PART_BYTES = 256
"""Parts of a workspace begin at multiples of it."""
MAXIMA = 256
"""Parts of x whose largest magnitudes make NVFP4's factor of all of x."""
PART = 32
"""Columns of y that a thread finishes at a time."""
TILES = (64, 128, 256)
"""Rows of W of a tile."""


class Form(NamedTuple):
    """The codes of both operands.

    Attributes:
        x, w: their types, e2m1 or e4m3.
        group: columns of a scale; 16 = scales are e4m3, under factors of x and of the rows of W (NVFP4), else e8m0.
    """

    x: str
    w: str
    group: int

    @property
    def mixed(self) -> bool:
        """Whether W has codes of 4 bits and x has codes of 8: they are multiplied as bytes."""
        return self.x != self.w

    @property
    def columns(self) -> int:
        """Of a slot: 128 bytes of a row of x, four instructions."""
        return 128 if self.x == "e4m3" else 256

    @property
    def divisor(self) -> int:
        """What K must be a multiple of: rows of whole 16 bytes, or what TMA spreads to bytes at a time."""
        return 128 if self.mixed else 32

    def slot_bytes(self, bn: int) -> int:
        """Shared memory of a slot: codes and scales of 128 rows of x and BN rows of W, which have whole tiles of scales."""
        scales = (ROWS + cdiv(bn, ROWS) * ROWS) * self.columns // self.group
        return (ROWS + bn) * 128 + scales

    def slots(self, bn: int) -> int:
        """As many as shared memory has room for, beside barriers and what alignment to 1024 bytes costs."""
        return (SHARED_BYTES - 4096) // self.slot_bytes(bn)


FORMS = {
    "nvfp4.nvfp4": Form("e2m1", "e2m1", 16),
    "mxfp4.mxfp4": Form("e2m1", "e2m1", 32),
    "mxfp8.mxfp8": Form("e4m3", "e4m3", 32),
    "mxfp4.mxfp8": Form("e4m3", "e2m1", 32),
}
"""Schemes that are multiplied."""


class Room(NamedTuple):
    """Where the parts of a workspace begin, in bytes, and its size."""

    scales: int
    factor: int
    size: int


def room_of(scheme: str, m: int, k: int) -> Room:
    """Codes of M rows of x, whole tiles of their scales, then NVFP4's factor and the maxima that it comes from."""
    of_x, group = QuantScheme.parse(str(QuantScheme.parse(scheme).activation)), FORMS[scheme].group
    scales = cdiv(m, ROWS) * cdiv(cdiv(k, group), GROUPS) * TILE_BYTES
    ends = [0]
    for size in (m * of_x.code_bytes(k), scales, 4 * (1 + MAXIMA)):
        ends.append(ends[-1] + cdiv(size, PART_BYTES) * PART_BYTES)
    return Room(*ends[1:])


class TensorMemory(NamedTuple):
    """Columns of tensor memory: the sums of two tiles from column 0 on, then scales, the last ones.

    Attributes:
        apart: from the sums of one tile to those of the other. shared: columns that both have.
        of_x, of_w: the first ones of scales. A tile of scales has 4.
    """

    apart: int
    shared: int
    of_x: int
    of_w: int


def tensor_memory(bn: int) -> TensorMemory:
    """The columns of products by BN rows of W, each by four instructions along K: every one has scales of 128 rows of x and of W."""
    of_w = TENSOR_COLUMNS - 4 * GROUPS * cdiv(bn, ROWS)
    of_x = of_w - 4 * GROUPS
    apart = min(bn, of_x - bn)
    return TensorMemory(apart, bn - apart, of_x, of_w)


def part_of(index: int, stage: int, parts: int, shared: int) -> int:
    """The part of a tile that is finished at turn `index`: shared columns first, the last ones of stage 0 and the first ones of stage 1."""
    return stage * index + (1 - stage) * (parts - 1 - index) if shared else index


def awaited(parts: int, shared: int) -> int:
    """How many parts are read before the next tile may be computed: those with shared columns, or all of them."""
    return cdiv(shared, PART) if shared else parts


def room(stage: int, turn: int, shared: int) -> tuple[int, int]:
    """The barrier that says that a tile's columns have been read, by stage, and its parity: the tile's own, or that of the tile before, whose columns
    were read after those of all others. That one is of the other stage, and of this turn if its stage comes first."""
    return (stage ^ 1, turn ^ stage ^ 1) if shared else (stage, turn ^ 1)


def tiles(m: int, n: int, gated: bool, processors: int) -> Iterator[tuple[int, bool]]:
    """(BN, whether the program gates), best first: the widest tiles that give every multiprocessor one, else as many as there can be.

    Gate and up of a tile of y begin at tiles of scales, 128 rows of W each. Where N / 2 is no multiple of that, gating follows in a launch of
    its own.
    """
    if gated and n % (2 * ROWS) == 0:
        yield 256, True
    wide = [bn for bn in TILES if cdiv(m, ROWS) * cdiv(n, bn) >= processors]
    first = max(wide, default=TILES[0])
    for bn in (first, *(bn for bn in TILES if bn != first)):
        yield bn, False
