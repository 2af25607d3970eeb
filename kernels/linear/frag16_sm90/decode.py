"""The schedule `decode`, whose warps copy for themselves: which shapes of a CTA fit a problem, and a model of their time on an H200."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache
from math import ceil, log2
from typing import NamedTuple

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernels.linear.frag16_sm90.instances import DECODE_ROWS, Format, limits, schedule

SCHEDULE = schedule("decode")
_MULTIPROCESSOR_BYTES = 228 * 1024
_CTA_BYTES, _RESERVED_BYTES, _MAX_DEPTH = (
    limits()[name] for name in ("cta_bytes", "reserved_bytes", "max_depth")
)


class Shape(NamedTuple):
    """A CTA: columns of x in eights, 16-row tiles per warp, tiles per slot, warps, slots of x, CTAs per SM."""

    nt: int
    rt: int
    c: int
    wk: int
    nx: int
    ctas: int


DEPTHS = (2, 3, 1, 4)
"""Slots of a warp's ring, what is usually best first: at equal modelled cost the first one is used."""


@cache
def shapes_of(form: Format) -> tuple[Shape, ...]:
    """The instances of a format."""
    return tuple(Shape(**row) for row in SCHEDULE.shapes_of(form))


def slots(shape: Shape, k: int, split: int, depth: int) -> int:
    """Slots of a ring that is asked to have `depth`: whole steps along K, and no more than there are."""
    sub = shape.rt // shape.c
    chunks = cdiv(cdiv(cdiv(k, 128), split), shape.wk) * sub
    return min(max(min(depth, chunks) // sub * sub, sub), _MAX_DEPTH // sub * sub)


def shared_bytes(shape: Shape, tile_bytes: int, m: int, k: int, split: int, depth: int) -> int:
    """Dynamic shared memory of a CTA."""
    return SCHEDULE.shared_bytes(*shape, m, split, depth, slots(shape, k, split, depth), tile_bytes)


def misfit(form: Format, config: Config, m: int, k: int) -> str | None:
    """Why a configuration does not run a problem, None if it does: entry.h checks the same."""
    nt, rt, wk, split, depth = (int(config[name]) for name in ("nt", "rt", "wk", "split", "depth"))
    if m > 8 * nt:
        return f"a CTA has {8 * nt} columns for rows of x, not {m}"
    shape = next((shape for shape in shapes_of(form) if (shape.nt, shape.rt, shape.wk) == (nt, rt, wk)), None)
    if shape is None:
        return f"{form.name} is not compiled for {wk} warps of {rt} tiles and {8 * nt} columns"
    size = shared_bytes(shape, form.tile_bytes, m, k, split, depth)
    return None if _has_room(shape, size) else f"the rings of a CTA take {size} bytes of shared memory"


def _has_room(shape: Shape, size: int) -> bool:
    return size + shape.wk * _MAX_DEPTH * 8 + _RESERVED_BYTES <= _CTA_BYTES


def candidates(form: Format, m: int, n: int, k: int) -> Iterator[tuple[Shape, int, int, int]]:
    """(shape, split, depth, shared bytes) that fit and leave no warp without work, each once: depths that make the same ring
    are one. m is at most 16."""
    need = 1 if m <= 8 else 2
    groups, tiles = cdiv(k, 128), cdiv(n, 16)
    for shape in shapes_of(form):
        if shape.nt != need:
            continue
        for split in (1, 2, 4, 8):
            if split > 1 and (groups < split * shape.wk or cdiv(tiles, shape.rt) * split > 4096):
                continue
            rings: set[int] = set()
            for depth in DEPTHS:
                if (ring := slots(shape, k, split, depth)) in rings:
                    continue
                rings.add(ring)
                size = shared_bytes(shape, form.tile_bytes, m, k, split, depth)
                if _has_room(shape, size):
                    yield shape, split, depth, size


class _Costs(NamedTuple):
    """Microseconds of what a launch consists of, for 8 or 16 columns of x.

    Attributes:
        tile, group: per tile and group of a multiprocessor's busiest scheduler.
        warp_tile, warp_group: per tile and group of one warp.
        alone: in addition where a ring of one step is filled only after it was used up.
        launch: per launch.
        doubling: per doubling of split.
        round: per round of CTAs.
        row: per row of x and group.
        packed: the fraction of the CTAs that fit an SM which it gets although other SMs are empty.
        tail: CTAs that an SM is late by where CTAs wait for room.
        power: how well the parts overlap.
    """

    tile: float
    group: float
    warp_tile: float
    warp_group: float
    alone: float
    launch: float
    doubling: float
    round: float
    row: float
    packed: float
    tail: float
    power: float


_COSTS = {
    1: _Costs(0.0303, 0.0936, 0.0675, 0.0779, 0.234, 1.657, 0.402, 0.889, 0.0072, 0.869, 0.675, 2.0),
    2: _Costs(0.1143, 0.0987, 0.0684, 0.4973, 0.217, 1.104, 0.542, 1.503, 0.0036, 0.117, 0.426, 2.73),
}
"""By columns of x in eights; fitted, with the formats' costs and the table below, to 4,250 times on an H200: every candidate of 61 problems
(bench/results/h200/kernelbench/regret_linear.json), and the best of 195 others of that time."""

_INSTANCES = {
    (1, 4, 8): 0.983,
    (1, 4, 4): 0.972,
    (1, 2, 16): 0.949,
    (1, 8, 4): 0.995,
    (1, 4, 12): 0.946,
    (1, 8, 8): 1.05,
    (1, 2, 8): 0.949,
    (1, 4, 16): 1.004,
    (2, 2, 8): 0.946,
    (2, 2, 16): 1.007,
}
"""Measured over modelled time of an instance (nt, rt, wk)."""


def microseconds(
    form: Format, shape: Shape, split: int, depth: int, size: int, m: int, n: int, k: int, processors: int
) -> float:
    """Expected time of one launch: the busiest scheduler, the longest warp, or memory, and what each launch costs.

    Where a multiprocessor has room for more CTAs than its share, the hardware fills some and leaves others empty: the busiest
    one has as many as fit, not the average. A deeper ring, for which fewer fit, is faster then; so is a grid that does not fit
    at once, whose CTAs go wherever one has ended.
    """
    costs, decoding = _COSTS[shape.nt], form.cost["decode"][shape.nt - 1]
    steps = cdiv(cdiv(cdiv(k, 128), split), shape.wk)
    ctas = cdiv(cdiv(n, 16), shape.rt) * split
    # Whole clusters of 4 and 8 do not fill every cluster of multiprocessors.
    average = ctas / (processors if split <= 2 else processors * 10 // 11)
    room = max(
        1, min(shape.ctas, _MULTIPROCESSOR_BYTES // (size + shape.wk * _MAX_DEPTH * 8 + _RESERVED_BYTES))
    )
    if room >= ceil(average):
        rounds, busiest = 1.0, ceil(average) + costs.packed * (min(room, ctas) - ceil(average))
    else:
        rounds, busiest = (average + costs.tail) / room, average + costs.tail
    alone = costs.alone if slots(shape, k, split, depth) == shape.rt // shape.c and steps > 1 else 0.0
    work = busiest * shape.wk / 4 * steps * (shape.rt * costs.tile * decoding + costs.group + costs.row * m)
    latency = rounds * steps * (shape.rt * costs.warp_tile * decoding + costs.warp_group + alone)
    memory = cdiv(n, 16) * cdiv(k, 128) * form.tile_bytes / 4.3e6
    slowest = float((work**costs.power + latency**costs.power + memory**costs.power) ** (1 / costs.power))
    slowest *= _INSTANCES[shape.nt, shape.rt, shape.wk]
    return slowest + costs.launch + costs.doubling * log2(split) + costs.round * rounds


@lru_cache(maxsize=4096)
def ranked(form: Format, m: int, n: int, k: int, processors: int) -> tuple[tuple[float, dict[str, int]], ...]:
    """(microseconds, configuration) of the candidates for one launch, best first; ties in the order of `candidates`."""
    rows = min(max(m, 1), DECODE_ROWS)
    costs = [
        (
            microseconds(form, shape, split, depth, size, rows, n, k, processors),
            config_of(shape, split, depth),
        )
        for shape, split, depth, size in candidates(form, rows, n, k)
    ]
    return tuple(sorted(costs, key=lambda pair: pair[0]))


def config_of(shape: Shape, split: int, depth: int) -> dict[str, int]:
    return {"nt": shape.nt, "rt": shape.rt, "wk": shape.wk, "split": split, "depth": depth}
