"""The schedule `decode`, M <= 16: which shapes of a CTA there are, and a model that ranks them.

The model has the form of that of the Hopper schedule (frag16_sm90/decode.py): the busiest scheduler, the longest warp, or memory. On an H100
its first choice was the fastest of 16 in six of nine problems, its second in the others (docs/performance/linear_weight_only.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernels.linear.frag16_sm80.formats import Format

ROWS = 16
"""Most rows of x."""
MOST_SHARED = 99 << 10
"""Shared memory that a CTA can have on sm_86, sm_89 and sm_120, the least of all targets."""
COUNTER_BYTES = 64 << 10
"""At the start of a workspace: one counter for each block of rows whose sums several CTAs share."""
SPLITS = (1, 2, 4, 8)


class Shape(NamedTuple):
    """A CTA: columns of x in eights, 16-row tiles, warps along K, slots of x, and groups of 128 k whose weights are loaded ahead."""

    nt: int
    rt: int
    wk: int
    nx: int
    pf: int


SHAPES = {
    "4 bits": (
        Shape(1, 1, 8, 3, 3),
        Shape(1, 2, 8, 3, 2),
        Shape(1, 2, 16, 3, 1),
        Shape(1, 4, 8, 3, 1),
        Shape(2, 1, 8, 2, 2),
        Shape(2, 2, 8, 2, 1),
    ),
    "8 bits": (
        Shape(1, 1, 8, 3, 2),
        Shape(1, 2, 8, 3, 1),
        Shape(1, 2, 16, 3, 1),
        Shape(1, 4, 8, 3, 1),
        Shape(2, 1, 8, 2, 1),
        Shape(2, 2, 8, 2, 1),
    ),
    "gguf": (
        Shape(1, 1, 8, 3, 2),
        Shape(1, 1, 16, 3, 2),
        Shape(1, 2, 8, 3, 2),
        Shape(1, 4, 8, 3, 1),
        Shape(2, 1, 8, 2, 1),
        Shape(2, 2, 8, 2, 1),
    ),
}
"""By kinds of formats; decode_entry.h has the same."""


def shapes_of(form: Format) -> tuple[Shape, ...]:
    """The shapes that are compiled for a format: those whose tiles fit into registers."""
    kind = "gguf" if form.more else "4 bits" if form.bits == 4 else "8 bits"
    return tuple(shape for shape in SHAPES[kind] if shape.rt < 4 or form.bits != 6)


def shape_of(form: Format, nt: int, rt: int, wk: int) -> Shape | None:
    """The shape with this key; None if it is not compiled."""
    return next((shape for shape in shapes_of(form) if shape[:3] == (nt, rt, wk)), None)


def ctas_of(shape: Shape, form: Format) -> int:
    """CTAs whose registers a multiprocessor holds: weights, x, sums of all groups and of one, and the rest. decode_entry.h has the same."""
    nt, rt, wk, _, pf = shape
    registers = (pf + 1) * rt * form.words + nt * (16 + 4 * rt + 4 + form.more) + 16
    return max(65536 // (wk * 32 * cdiv(registers, 8) * 8), 1)


def shared_bytes(shape: Shape, m: int) -> int:
    """Dynamic shared memory of a CTA: the slots of x, then in their place the sums of the warps."""
    return max(shape.wk * shape.nx * m * 256, shape.wk * shape.rt * shape.nt * 512)


def workspace_of(n: int, config: Config) -> int:
    """Bytes of the counters and of the CTAs' sums; 0 without a split."""
    nt, rt, split = (int(config[name]) for name in ("nt", "rt", "split"))
    return COUNTER_BYTES + cdiv(cdiv(n, 16), rt) * split * rt * nt * 512 if split > 1 else 0


def candidates(form: Format, m: int, n: int, k: int) -> Iterator[tuple[Shape, int]]:
    """(shape, split) for m <= 16 rows of x: no warp is without work because of a split."""
    for shape in shapes_of(form):
        if shape.nt != (1 if m <= 8 else 2):
            continue
        for split in SPLITS:
            blocks = cdiv(cdiv(n, 16), shape.rt)
            if split == 1 or (cdiv(k, 128) >= split * shape.wk and blocks * 4 <= COUNTER_BYTES):
                yield shape, split


_TILE, _GROUP, _WARP_TILE, _WARP_GROUP, _ROW = 0.035, 0.09, 0.07, 0.1, 0.005
_LAUNCH, _SPLIT, _ROUND, _BYTES = 2.0, 1.5, 1.0, 3.0e6


def microseconds(form: Format, shape: Shape, split: int, m: int, n: int, k: int, processors: int) -> float:
    """Expected time of one launch on a device with 3 TB/s; only the order of candidates counts."""
    steps = cdiv(cdiv(cdiv(k, 128), split), shape.wk)
    ctas = cdiv(cdiv(n, 16), shape.rt) * split
    rounds = cdiv(ctas, processors * ctas_of(shape, form))
    busiest = ceil(ctas / processors)
    work = busiest * shape.wk / 4 * steps * (shape.rt * _TILE * shape.nt**0.5 + _GROUP + _ROW * m)
    latency = rounds * steps * (shape.rt * _WARP_TILE + _WARP_GROUP)
    memory = cdiv(n, 16) * cdiv(k, 128) * form.tile_bytes / _BYTES
    slowest = float((work**2 + latency**2 + memory**2) ** 0.5)
    return _LAUNCH + slowest + _ROUND * rounds + (_SPLIT if split > 1 else 0.0)


@lru_cache(maxsize=4096)
def ranked(form: Format, m: int, n: int, k: int, processors: int) -> tuple[tuple[float, dict[str, int]], ...]:
    """(microseconds, configuration) of the candidates, best first."""
    rows = min(max(m, 1), ROWS)
    costs = [
        (
            microseconds(form, shape, split, rows, n, k, processors),
            {"nt": shape.nt, "rt": shape.rt, "wk": shape.wk, "split": split},
        )
        for shape, split in candidates(form, rows, n, k)
    ]
    return tuple(sorted(costs, key=lambda pair: pair[0]))
