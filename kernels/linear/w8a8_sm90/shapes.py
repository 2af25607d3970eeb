"""Which CTA shapes of `product.cuh` fit a problem, and a model of their time on an H200."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import log2
from typing import NamedTuple

from gristmill.kernel_registry.scheme import BLOCK, cdiv

SHARED_BYTES, CTA_BYTES = 228 << 10, 1 << 10
"""Shared memory of a multiprocessor, and what each CTA takes of it besides its own."""
MOST_SHARED, MOST_SLOTS = 227 << 10, 32
BAND_ROWS, SQUARE_BAND_ROWS = 1024, 2048
"""Rows of y whose tiles follow each other in time, so that the rows of x that they read stay in L2; of staggered shapes, with which the tiles of
all multiprocessors are about as many rows as columns."""


STAGGERED = 3
"""`Shape.plain` from here on: the warpgroups keep half a slot apart."""
WHOLE = 4
"""`Shape.plain` from here on: a tile of y is staged whole."""


class Operands(NamedTuple):
    """What is multiplied.

    Attributes:
        format: the format in the entry's name.
        schemes: schemes of weights and activations.
        code: the quantizer's code for the format of x.
        blocks: whether scales are per 128 x 128 weights and 128 columns of x.
        sums: whether the sums of x's codes are needed, for weights with an offset of 128.
    """

    format: str
    schemes: tuple[str, ...]
    code: int
    blocks: bool = False
    sums: bool = False


OPERANDS = (
    Operands("fp8", ("fp8.fp8_token", "fp8_ch.fp8_token"), 0),
    Operands("fp8_block", ("fp8_block.fp8_g128",), 1, blocks=True),
    Operands("int8", ("int8_ch.int8_token",), 2, sums=True),
)
SCHEMES = tuple(scheme for operands in OPERANDS for scheme in operands.schemes)


def operands_of(name: str) -> Operands:
    """The operands of a format or scheme; KeyError if there are none."""
    for operands in OPERANDS:
        if name == operands.format or name in operands.schemes:
            return operands
    raise KeyError(name)


def workspace_bytes(operands: Operands, m: int, k: int, gated: int = 0, given: bool = False) -> int:
    """Bytes of M rows of codes, their scales, and their sums, unless codes are given; then, if gate and up are `gated` columns together, of
    their products."""
    if given:
        return 2 * m * gated
    pitch = cdiv(m, 4) * 4
    scales = cdiv(k, BLOCK) if operands.blocks else 2 if operands.sums else 1
    return cdiv(m * k, 16) * 16 + 4 * pitch * scales + 2 * m * gated


class Shape(NamedTuple):
    """A CTA: rows of operand A and of B, whether A is x and not W (2: and the warpgroups multiply in turns; 3: half a slot apart; 4: and
    tiles of y are staged whole; 5: and CTAs come in pairs, of neighbouring columns; 6: as 4, and the second warpgroup waits once a
    tile, and W of the next tile is fetched into L2), warpgroups, CTAs of a multiprocessor at most."""

    rows: int
    columns: int
    plain: int
    warpgroups: int
    ctas: int

    @property
    def tile_m(self) -> int:
        """Rows of y in a tile."""
        return self.rows if self.plain else self.columns

    @property
    def tile_n(self) -> int:
        """Columns of y in a tile."""
        return self.columns if self.plain else self.rows

    @property
    def end_bytes(self) -> int:
        """Shared memory of the end of a tile: at most 64 rows of y for each warpgroup, or all, scales of x and of W."""
        tokens = self.rows // self.warpgroups if self.plain else self.columns
        if self.plain >= WHOLE:
            return (
                self.rows * self.columns * 2
                + self.warpgroups * cdiv(tokens * 8 + self.columns * 8, 1024) * 1024
            )
        return self.warpgroups * (min(tokens, 64) * 128 + self.columns * 8) + self.rows * 8

    @property
    def barrier_bytes(self) -> int:
        """Shared memory of the barriers of a slot."""
        return 24 if self.plain >= STAGGERED else 16


SHAPES = (
    Shape(64, 8, 0, 1, 4),
    Shape(64, 16, 0, 1, 4),
    Shape(64, 32, 0, 1, 4),
    Shape(64, 64, 0, 1, 2),
    Shape(128, 16, 0, 2, 2),
    Shape(128, 32, 0, 2, 2),
    Shape(128, 64, 0, 2, 1),
    Shape(128, 128, 1, 2, 1),
    Shape(256, 128, 1, 2, 1),
    Shape(64, 32, 2, 1, 3),
    Shape(64, 64, 2, 1, 2),
    Shape(128, 64, 2, 2, 1),
    Shape(128, 96, 2, 2, 1),
    Shape(128, 128, 2, 2, 1),
    Shape(256, 128, 2, 2, 1),
    Shape(256, 128, 3, 2, 1),
    Shape(256, 128, 4, 2, 1),
    Shape(128, 128, 5, 2, 1),
    Shape(256, 128, 6, 2, 1),
)
"""The instances: GM_SHAPES, GM_TURNS and GM_STAGGERED of entry.h."""


class Choice(NamedTuple):
    """How a shape is used.

    Attributes:
        split: CTAs of a cluster that share a tile along K.
        ctas: CTAs of a multiprocessor.
    """

    shape: Shape
    split: int = 1
    ctas: int = 1


def slots_of(operands: Operands, shape: Shape, ctas: int) -> int:
    """Slots of 128 columns of W and x that fit beside what the end of a tile needs, `ctas` CTAs to a multiprocessor."""
    slot = (
        (shape.rows + shape.columns) * BLOCK
        + (4 * shape.tile_m if operands.blocks else 0)
        + shape.barrier_bytes
    )
    room = min(MOST_SHARED, SHARED_BYTES // ctas - CTA_BYTES) - shape.end_bytes
    return min(MOST_SLOTS, room // slot)


def config_of(operands: Operands, choice: Choice, processors: int) -> dict[str, int]:
    """The configuration of a choice."""
    shape, split, ctas = choice
    return {
        "rows": shape.rows,
        "columns": shape.columns,
        "plain": shape.plain,
        "slots": slots_of(operands, shape, ctas),
        "split": split,
        "ctas": ctas,
        "band": (SQUARE_BAND_ROWS if shape.plain >= STAGGERED else BAND_ROWS) // shape.tile_m,
        "grid": processors * ctas,
    }


def candidates(operands: Operands, m: int, n: int, k: int, processors: int) -> Iterator[Choice]:
    """The choices that suit a problem."""
    blocks = cdiv(k, BLOCK)
    for shape in SHAPES:
        if shape.tile_m > 8 and shape.tile_m // 2 >= m and (shape.plain or shape.columns > 8):
            continue  # half the rows suffice
        if shape.tile_m < 128 and shape.tile_m * 4 < m:
            continue  # weights would be read too often
        tiles = cdiv(n, shape.tile_n) * cdiv(m, shape.tile_m)
        for split in (1,) if shape.plain else (1, 2, 4, 8):
            if split > 1 and (split > blocks or tiles * split > 2 * shape.ctas * processors):
                continue
            for ctas in range(1, shape.ctas + 1):
                slots = slots_of(operands, shape, ctas)
                sums = split * max(1, shape.columns // 8 // split) * shape.rows * 32
                if slots < 2 or (split > 1 and slots * (shape.rows + shape.columns) * BLOCK < sums):
                    continue
                yield Choice(shape, split, ctas)


_COSTS = {
    (64, 8): (0.123, 2.0),
    (64, 16): (0.12, 1.8),
    (64, 32): (0.15, 1.3),
    (64, 64): (0.13, 1.8),
    (128, 16): (0.13, 1.9),
    (128, 32): (0.157, 2.0),
    (128, 64): (0.23, 2.0),
    (128, 96): (0.27, 2.0),
    (128, 128): (0.31, 2.0),
    (256, 128): (0.69, 2.2),
}
"""Microseconds of 128 columns of a tile, and of its end, by rows of A and B: fitted to products of 7168 x 2048, 4096 x 7168 and
24576 x 1536 at M = 1 to 4096, before there were turns; 128 x 96 lies between its neighbours."""
START, CLUSTER, DOUBLING, SCALING = 1.5, 1.3, 0.1, 1.25
"""Microseconds of a launch, of sums over a cluster, and more for each doubling of it; the factor of block scales."""
COPIED, FEWER_SLOTS, BESIDE = 0.12e6, 0.15, 0.45
"""Bytes that a multiprocessor copies in a microsecond; the cost of each further CTA, which leaves fewer slots to the others; what is
gained where two fit and the next launch has room to begin beside this one."""


def microseconds(operands: Operands, choice: Choice, m: int, n: int, k: int, processors: int) -> float:
    """Expected time: the busiest multiprocessor or memory, and what begins and ends a launch."""
    shape, split, ctas = choice
    column, end = _COSTS[shape[:2]]
    tiles, blocks = cdiv(n, shape.tile_n) * cdiv(m, shape.tile_m), cdiv(k, BLOCK)
    waves = cdiv(tiles * split, processors * ctas)
    chain = waves * (cdiv(blocks, split) * column * (SCALING if operands.blocks else 1.0) + end)
    memory = (n * k + m * k + 2 * m * n) / 4.3e6
    sums = CLUSTER + DOUBLING * log2(split) if split > 1 else 0.0
    copies = (
        cdiv(tiles * split, processors) * cdiv(blocks, split) * (shape.rows + shape.columns) * BLOCK / COPIED
    )
    slots = FEWER_SLOTS * (ctas - 1) - (BESIDE if ctas == 2 and tiles * split <= processors else 0.0)
    return float((chain**4 + memory**4 + copies**4) ** 0.25 + START + sums + slots)


_BESIDE = {
    (64, 32, 2): 0.88,
    (64, 64, 2): 0.85,
    (128, 64, 2): 0.88,
    (128, 128, 2): 1.01,
    (256, 128, 2): 1.0,
    (256, 128, 3): 0.97,
    (256, 128, 4): 0.92,
    (128, 128, 5): 0.95,
    (256, 128, 6): 0.905,
}
"""The time of instances in turns or staggered by that of the same tile without, on an H200, by rows, columns and `Shape.plain`
(bench/results/h200/linear_w8a8_staggered.json, and linear_w8a8_tiles.json with kind 6: the tile that is ranked first takes 0.7 % more than the
best in the mean of 94 problems of which it is known, 8 % at most). 128 x 96 has none: the model sees one wave of smaller tiles, which took up to
8 % less time than 128 x 128 in three problems, and 18 % more in a fourth (5120 x 5120, M = 200, e4m3 by token)."""
_TWO_CTAS = 1.1
"""The same where two of their small CTAs share a multiprocessor."""


def _beside(operands: Operands, choice: Choice, m: int) -> float | None:
    """The factor of an instance in turns or staggered, None for one that is chosen by measured times only."""
    shape = choice.shape
    if shape.plain < 2:
        return 1.0
    if (
        shape[:3] not in _BESIDE
        or operands.sums
        or (shape.plain == 5 and operands.blocks)
        or (shape.rows == 256 and not operands.blocks)
    ):
        return None
    if shape.plain == 5 and m < 1024:
        return None
    return _BESIDE[shape[:3]] * (_TWO_CTAS if choice.ctas > 1 and shape.rows == 64 else 1.0)


@lru_cache(maxsize=4096)
def ranked(
    operands: Operands, m: int, n: int, k: int, processors: int
) -> tuple[tuple[float, dict[str, int]], ...]:
    """(microseconds, configuration) of the candidates, best first, those that are chosen by measured times only behind all others; ties in the
    order of `candidates`."""
    costs: list[tuple[bool, float, dict[str, int]]] = []
    for choice in candidates(operands, m, n, k, processors):
        factor = _beside(operands, choice, m)
        us = microseconds(operands, choice, m, n, k, processors) * (factor or 1.0)
        costs.append((factor is None, us, config_of(operands, choice, processors)))
    return tuple((us, config) for _, us, config in sorted(costs, key=lambda row: row[:2]))
