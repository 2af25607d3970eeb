"""The schedule `decode` for sm_75, M <= 8: which shapes of a CTA there are, and a model that ranks them.

Nothing of it was measured on a Turing GPU. Its numbers are estimates for a T4: only the order of candidates counts, and tuning measures them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernels.linear.frag16_sm80.decode import COUNTER_BYTES, SPLITS
from gristmill.kernels.linear.frag16_sm80.formats import Format

ROWS = 8
"""Most rows of x. Slots of x for more would leave room for too few warps: the schedule `gemm` takes 16 rows."""
SHARED = 64 << 10
"""Shared memory of a multiprocessor, all of which a CTA can have."""
STATIC_SHARED = 128
"""Of it what a kernel takes besides the slots."""
THREADS = 1024
"""Of a multiprocessor."""


class Shape(NamedTuple):
    """A CTA: 16-row tiles, warps along K, and groups of 128 k whose weights are loaded ahead."""

    rt: int
    wk: int
    pf: int


SHAPES = (Shape(1, 8, 2), Shape(2, 8, 1), Shape(2, 4, 1), Shape(4, 4, 1))
"""decode_entry.h has the same."""


def shapes_of(form: Format) -> tuple[Shape, ...]:
    """The shapes that are compiled for a format: those whose tiles fit into registers."""
    return tuple(shape for shape in SHAPES if shape.rt < 4 or form.tile_bytes <= 1600)


def shape_of(form: Format, rt: int, wk: int) -> Shape | None:
    """The shape with this key; None if it is not compiled."""
    return next((shape for shape in shapes_of(form) if shape[:2] == (rt, wk)), None)


def shared_bytes(shape: Shape, m: int) -> int:
    """Dynamic shared memory of a CTA: two slots of x per warp, then in their place the sums of the warps."""
    return max(shape.wk * 2 * m * 256, shape.wk * shape.rt * 512)


def ctas_of(shape: Shape, form: Format) -> int:
    """CTAs whose registers and threads a multiprocessor holds. decode_entry.h has the same."""
    rt, wk, pf = shape
    registers = (pf + 1) * rt * form.words + 8 * rt + form.more + 44
    return min(65536 // (wk * 32 * cdiv(registers, 8) * 8), THREADS // (wk * 32))


def workspace_of(n: int, config: Config) -> int:
    """Bytes of the counters and of the CTAs' sums; 0 without a split."""
    rt, split = int(config["rt"]), int(config["split"])
    return COUNTER_BYTES + cdiv(cdiv(n, 16), rt) * split * rt * 512 if split > 1 else 0


def candidates(form: Format, n: int, k: int) -> Iterator[tuple[Shape, int]]:
    """(shape, split): no warp is without work because of a split."""
    for shape in shapes_of(form):
        for split in SPLITS:
            blocks = cdiv(cdiv(n, 16), shape.rt)
            if split == 1 or (cdiv(k, 128) >= split * shape.wk and blocks * 4 <= COUNTER_BYTES):
                yield shape, split


_STEP, _TILE = 0.6, 0.15
"""Microseconds that a warp waits for x of a step and for a tile."""
_BUSY_STEP, _BUSY_TILE = 0.05, 0.1
"""Microseconds that they take a scheduler."""
_LAUNCH, _SPLIT, _BYTES = 3.0, 2.0, 2.7e5


def microseconds(form: Format, shape: Shape, split: int, m: int, n: int, k: int, processors: int) -> float:
    """Expected time of one launch: the busiest scheduler, the longest warp, or memory."""
    steps = cdiv(cdiv(cdiv(k, 128), split), shape.wk)
    ctas = cdiv(cdiv(n, 16), shape.rt) * split
    resident = min(ctas_of(shape, form), SHARED // (shared_bytes(shape, m) + STATIC_SHARED))
    work = cdiv(ctas, processors) * shape.wk / 4 * steps * (shape.rt * _BUSY_TILE + _BUSY_STEP)
    latency = cdiv(ctas, processors * resident) * steps * (shape.rt * _TILE + _STEP)
    memory = cdiv(n, 16) * cdiv(k, 128) * form.tile_bytes / _BYTES
    slowest = float((work**2 + latency**2 + memory**2) ** 0.5)
    return _LAUNCH + slowest + (_SPLIT if split > 1 else 0.0)


@lru_cache(maxsize=4096)
def ranked(form: Format, m: int, n: int, k: int, processors: int) -> tuple[tuple[float, dict[str, int]], ...]:
    """(microseconds, configuration) of the candidates, best first."""
    rows = min(max(m, 1), ROWS)
    costs = [
        (
            microseconds(form, shape, split, rows, n, k, processors),
            {"nt": 1, "rt": shape.rt, "wk": shape.wk, "split": split},
        )
        for shape, split in candidates(form, n, k)
    ]
    return tuple(sorted(costs, key=lambda pair: pair[0]))
