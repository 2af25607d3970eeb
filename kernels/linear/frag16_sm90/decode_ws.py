"""The schedule `decode_ws`, warp-specialised: which shapes of a CTA fit a problem, and a model of their time on an H200."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache
from math import log2
from typing import NamedTuple

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernels.linear.frag16_sm90.instances import DECODE_ROWS, Format, limits, schedule

SCHEDULE = schedule("decode_ws")
_CTA_BYTES, _RESERVED_BYTES, _MAX_DEPTH = (
    limits()[name] for name in ("cta_bytes", "reserved_bytes", "max_depth")
)


class Shape(NamedTuple):
    """A CTA: columns of x in eights, 16-row tiles per warp, warps along N and K. One CTA fills an SM."""

    nt: int
    rt: int
    wn: int
    wk: int


@cache
def shapes_of(form: Format) -> tuple[Shape, ...]:
    """The instances of a format."""
    return tuple(Shape(**row) for row in SCHEDULE.shapes_of(form))


def shared_bytes(shape: Shape, tile_bytes: int, split: int, depth: int) -> int:
    """Dynamic shared memory of a CTA."""
    return SCHEDULE.shared_bytes(*shape, DECODE_ROWS, split, depth, depth, tile_bytes)


def misfit(form: Format, config: Config, m: int, k: int) -> str | None:
    """Why a configuration does not run a problem, None if it does: entry.h checks the same. It is one of this schedule."""
    columns = 8 * int(config["nt"])
    return None if m <= columns else f"a CTA has {columns} columns for rows of x, not {m}"


def candidates(form: Format, m: int, n: int, k: int) -> Iterator[tuple[Shape, int, int, int]]:
    """(shape, split, depth, shared bytes) that fit and leave no warp without work: rings of one to four slots a slice, and no more than
    one beyond what a CTA goes along K. m is at most 16."""
    need = 1 if m <= 8 else 2
    groups, tiles = cdiv(k, 128), cdiv(n, 16)
    for shape in shapes_of(form):
        if shape.nt != need:
            continue
        for split in (1, 2, 4, 8):
            if split > 1 and (groups < split * shape.wk or cdiv(tiles, shape.rt * shape.wn) * split > 4096):
                continue
            for depth in range(shape.wk, _MAX_DEPTH + 1, shape.wk):
                if depth > shape.wk and depth - shape.wk >= cdiv(groups, split):
                    continue
                size = shared_bytes(shape, form.tile_bytes, split, depth)
                if size + _RESERVED_BYTES <= _CTA_BYTES:
                    yield shape, split, depth, size


class _Costs(NamedTuple):
    """Microseconds of what a launch consists of, for 8 or 16 columns of x.

    Attributes:
        tile, group: per tile of 16 x 128 weights of a multiprocessor, and per group of a warp.
        warp_tile: per tile of one warp.
        alone: in addition where a slice has one slot and waits for each.
        launch: per launch.
        doubling: per doubling of split.
        round: per round of CTAs.
        power: how well the parts overlap.
    """

    tile: float
    group: float
    warp_tile: float
    alone: float
    launch: float
    doubling: float
    round: float
    power: float


_COSTS = {
    1: _Costs(0.0104, 0.064, 0.155, 0.637, 2.43, 0.438, 2.72, 3.09),
    2: _Costs(0.0135, 0.0572, 0.145, 0.574, 3.01, 0.363, 2.88, 2.71),
}
"""By columns of x in eights; fitted, with the formats' costs and the table below, to 5,618 times on an H200: every candidate of 160
problems, of which 56 are those of bench/results/h200/kernelbench/regret_linear_64.json."""

_INSTANCES = {
    (1, 7, 2, 4): 0.926,
    (2, 7, 2, 4): 0.979,
    (2, 6, 2, 4): 0.963,
    (2, 5, 2, 4): 0.921,
    (2, 4, 2, 4): 0.858,
    (2, 4, 1, 8): 1.03,
    (1, 8, 2, 4): 0.916,
    (1, 4, 2, 4): 0.85,
    (2, 8, 2, 4): 0.988,
    (2, 2, 2, 8): 0.95,
}
"""What an instance takes next to what the model says; more for those of eight slices than by the fit, which favoured them where N is small."""


def microseconds(
    form: Format, shape: Shape, split: int, depth: int, n: int, k: int, processors: int
) -> float:
    """Expected time of one launch: the busiest multiprocessor, the longest warp, or memory, and what each launch costs."""
    costs, rows, decoding = (
        _COSTS[shape.nt],
        shape.wn * shape.rt,
        form.cost["decode_ws"][shape.nt - 1],
    )
    groups = cdiv(cdiv(k, 128), split)
    steps = cdiv(groups, shape.wk)
    ctas = cdiv(cdiv(n, 16), rows) * split
    # Whole clusters of 4 and 8 do not fill every cluster of multiprocessors.
    rounds = cdiv(ctas, processors if split <= 2 else processors * 10 // 11)
    work = rounds * groups * (rows * costs.tile * decoding + shape.wn * costs.group)
    latency = rounds * steps * (shape.rt * costs.warp_tile * decoding + costs.alone * (depth == shape.wk))
    memory = cdiv(n, 16) * cdiv(k, 128) * form.tile_bytes / 4.3e6
    slowest = _INSTANCES[shape] * float(
        (work**costs.power + latency**costs.power + memory**costs.power) ** (1 / costs.power)
    )
    return slowest + costs.launch + costs.doubling * log2(split) + costs.round * (rounds - 1)


@lru_cache(maxsize=4096)
def ranked(form: Format, m: int, n: int, k: int, processors: int) -> tuple[tuple[float, dict[str, int]], ...]:
    """(microseconds, configuration) of the candidates for one launch, best first; ties in the order of `candidates`."""
    rows = min(max(m, 1), DECODE_ROWS)
    costs = [
        (microseconds(form, shape, split, depth, n, k, processors), config_of(shape, split, depth))
        for shape, split, depth, _ in candidates(form, rows, n, k)
    ]
    return tuple(sorted(costs, key=lambda pair: pair[0]))


def config_of(shape: Shape, split: int, depth: int) -> dict[str, int]:
    return {**shape._asdict(), "split": split, "depth": depth}
