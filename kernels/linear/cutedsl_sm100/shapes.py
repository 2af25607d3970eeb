"""Tiles of products on data-centre Blackwell, and which of them suits a problem."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from gristmill.kernel_registry.kernel import ConfigValue
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernel_registry.target import Target
from gristmill.kernels.cutedsl import PACKAGES
from gristmill.kernels.cutedsl.devices import PROCESSORS

ROWS, SLOT_BYTES = 128, 128
"""Rows of x of a tile; bytes of a row of a slot."""
SCALES = 4
"""Slots of the scales of x, for products with scales of blocks."""
BARRIERS = 1 << 10
"""Shared memory before the rings."""


class Tile(NamedTuple):
    """A tile: rows of W; slots of its ring; products that tensor memory has room for; quads of warps that finish it."""

    bn: int
    slots: int
    stages: int
    quads: int

    def shared_bytes(self, blocks: bool) -> int:
        """Shared memory of a CTA: the ring, the scales of x, and 32 rows by 64 columns of y of each warp that finishes."""
        ring = self.slots * (ROWS + self.bn) * SLOT_BYTES
        return BARRIERS + ring + (SCALES if blocks else 1) * ROWS * 4 + 4 * self.quads * 32 * 64 * 2


WHOLE = (Tile(256, 4, 2, 1), Tile(128, 6, 2, 1), Tile(64, 8, 2, 1))
"""For sums of all columns of K."""
BLOCKS = (Tile(256, 4, 2, 2), Tile(128, 6, 4, 2), Tile(64, 8, 8, 1))
"""For sums of slots, which the warps that finish add up in registers."""


def ranked(tiles: tuple[Tile, ...], m: int, n: int, processors: int) -> list[Tile]:
    """The tiles, best first for an output of M rows and a weight of N rows, by an estimate, not a measurement: a multiprocessor copies 128 rows
    of x and BN of W for each slot."""

    def rows(tile: Tile) -> int:
        return cdiv(cdiv(m, ROWS) * cdiv(n, tile.bn), processors) * (ROWS + tile.bn)

    return sorted(tiles, key=rows)


def configs(
    tiles: tuple[Tile, ...], problem: Problem, target: Target, **more: ConfigValue
) -> Iterator[dict[str, ConfigValue]]:
    """A configuration for each tile, best first: one CTA per multiprocessor, the epilogue, x's dtype, and the architecture to compile for."""
    (m, n), processors = problem.integers(*"mn"), target.multiprocessors or PROCESSORS
    fixed: dict[str, ConfigValue] = {
        "epilogue": "+".join(sorted(problem.flags("epilogue"))) or "none",
        "x": problem.text("x"),
        "arch": target.nvcc_arch or "sm_100a",
        "ctas": processors,
    }
    for tile in ranked(tiles, max(m, 1), n, processors):
        yield {**tile._asdict(), **fixed, **more}


def requirement(*loads: str) -> Requirement:
    """What a kernel needs, with the native code that its launches load too."""
    return Requirement(
        features=(frozenset({"tcgen05", "tma"}),),
        vendors=("nvidia",),
        packages=PACKAGES,
        code="cutedsl:sm_100f",
        loads=loads,
    )
