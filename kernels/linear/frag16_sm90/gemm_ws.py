"""The schedule `gemm_ws`, for any number of rows: which shapes of a CTA fit a problem, and a model of their time on an H200."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache
from math import log2
from typing import NamedTuple

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernels.linear.frag16_sm90.instances import Format, limits, schedule

SCHEDULE = schedule("gemm_ws")
FLAG_BYTES = limits()["flag_bytes"]
BAND, BAND_BYTES = 8, 16 << 20
"""Tiles along M that follow each other in time: no more, and no more bytes of x, which stay in L2 beside the weights."""
L2_BYTES, RESIDENT = 50 << 20, 20 << 20
"""An H200's L2, of which an operand can keep half; weights of so few bytes stay there from one tile along M to the next."""


class Shape(NamedTuple):
    """A CTA: rows of x, blocks of 64 rows of W, warpgroups that alternate along K for each of those, CTAs per SM, slots of x
    (64 k) beside 4-bit and 8-bit weights, slots of those (128 k), independent accumulators, products in flight."""

    mt: int
    c: int
    slices: int
    ctas: int
    xs4: int
    xs8: int
    ws4: int
    ws8: int
    chains: int
    pending: int


@cache
def shapes_of(form: Format) -> tuple[Shape, ...]:
    """The instances of a format."""
    return tuple(Shape(**row) for row in SCHEDULE.shapes_of(form))


def slots_of(form: Format, shape: Shape) -> tuple[int, int]:
    """Slots of x (64 k) and of weights (128 k)."""
    return (shape.xs8, shape.ws8) if form.bits == 8 else (shape.xs4, shape.ws4)


def lags_of(form: Format, shape: Shape) -> tuple[int, ...]:
    """Possible lags in groups between the halves of a CTA's warpgroups: fewer than the slots of weights."""
    return tuple(lag for lag in _LAGS.get(shape[:4], ()) if lag < slots_of(form, shape)[1])


def gates(n: int) -> bool:
    """Whether silu(gate) * up of N rows of W is computed in the epilogue: 32 rows of gate and as many of up for two pairs of warps."""
    return n % 64 == 0


def workspace_bytes(config: Config) -> int:
    """Bytes of the flags, which are zero before and after a launch, and of the partial sums after them."""
    return (
        FLAG_BYTES + int(config["grid"]) * int(config["mt"]) * int(config["c"]) * 256 if config["even"] else 0
    )


class Costs(NamedTuple):
    """Microseconds on an H200 that a shape costs.

    Attributes:
        group: a group of a multiprocessor's work.
        late: a group of one CTA.
        start: the launch.
        cluster: split-K in a cluster.
        doubling: each doubling of that.
        deal: dividing tiles along K.
        part: each CTA of a divided tile.
        wave: each wave of CTAs after the first.
        hot: the fraction, not microseconds, by which products of 300 and more are slower, for power.
    """

    group: float
    late: float
    start: float
    cluster: float
    doubling: float
    deal: float
    part: float
    wave: float
    hot: float


COSTS = {
    (32, 2, 1, 2): Costs(0.307, 0.336, 3.54, 1.38, 0, 1.2, 0.18, 3.79, 0.972),
    (64, 2, 1, 2): Costs(0.373, 0.403, 3.32, 2.13, 0.153, 0.816, 0.454, 5.32, 0.684),
    (128, 2, 1, 1): Costs(0.6, 0.584, 2.52, 2.68, 0, 3.59, 0.123, 7.01, 0.202),
    (64, 1, 4, 1): Costs(0.193, 0.193, 3.73, 0.857, 0.397, 0, 0, 3.63, 0.912),
    (128, 1, 2, 1): Costs(0.284, 0.284, 2.21, 0.785, 1.09, 0, 0, 3.72, 0),
    (128, 4, 1, 1): Costs(1.55, 0.366, 0.91, 1.27, 2.37, 6.51, 0.871, 9.4, 0.114),
    (80, 2, 1, 1): Costs(0.4, 0.4, 2.52, 2.68, 0, 3.59, 0.123, 7.01, 0.202),
    (96, 2, 1, 1): Costs(0.47, 0.45, 2.52, 2.68, 0, 3.59, 0.123, 7.01, 0.202),
    (160, 2, 1, 1): Costs(0.78, 0.72, 2.52, 2.68, 0, 3.59, 0.123, 7.01, 0.202),
    (192, 2, 1, 1): Costs(0.95, 0.87, 2.52, 2.68, 0, 3.59, 0.123, 7.01, 0.202),
    (224, 2, 1, 1): Costs(1.12, 1.01, 2.52, 2.68, 0, 3.59, 0.123, 7.01, 0.202),
    (96, 1, 2, 1): Costs(0.22, 0.22, 2.21, 0.785, 1.09, 0, 0, 3.72, 0),
    (160, 1, 2, 1): Costs(0.36, 0.36, 2.21, 0.785, 1.09, 0, 0, 3.72, 0),
    (192, 1, 2, 1): Costs(0.44, 0.44, 2.21, 0.785, 1.09, 0, 0, 3.72, 0),
    (128, 3, 1, 1): Costs(1.12, 0.5, 1.8, 2.68, 0, 5, 0.4, 8, 0.15),
    (256, 2, 1, 1): Costs(1.44, 0.408, 1.8, 4.84, 0, 7.81, 0.0383, 11, 0.145),
}
"""By the first four numbers of a shape. `lab.gemm_ws_costs` fits them to measured times."""

_LAGS = {(128, 4, 1, 1): (2, 1), (128, 3, 1, 1): (2, 1)}
"""Lags in groups between the halves of the warpgroups of a CTA that processes several tiles, by shape."""
_STORE = 0.8
"""Microseconds of a tile's epilogue that overlap with products of the other half. Tiles of 4-bit weights are staged whole and stored by TMA, and
take as long without a lag."""


class Partition(NamedTuple):
    """The partition of a problem: CTAs that share a tile along K (split-K); tiles divided along K (stream-K): 0 none, 1 the last one or
    two tiles per CTA, 2 only those beyond whole waves of tiles; CTAs; lag in groups between the halves of their warpgroups."""

    split: int
    even: int
    grid: int
    lag: int = 0


class Work(NamedTuple):
    """Groups of the busiest multiprocessor, consecutive groups of a CTA, waves of CTAs, CTAs per divided tile, share of the tiles whose
    CTAs are at different positions along K."""

    busiest: float
    chain: int
    waves: int
    dealt: float
    apart: float = 0.0


def _waves(shape: Shape, partition: Partition, tiles: int, groups: int, processors: int) -> Work:
    """The distribution of the groups of `tiles` tiles over multiprocessors and CTAs."""
    split, grid = partition.split, partition.grid
    if partition.even and tiles % grid:
        dealt = tiles % grid if partition.even == 2 else tiles if tiles < 2 * grid else tiles % grid + grid
        chain = cdiv(dealt * groups, grid) + (tiles - dealt) // grid * groups
        sharers = max(1.0, min(grid / dealt, groups))
        return Work(
            chain * grid / processors, chain, 1, sharers, 0.0 if partition.even == 2 else dealt / tiles
        )
    if split == 1 and shape.slices == 1:
        chain = cdiv(tiles, grid) * groups
        return Work(chain * cdiv(min(tiles, grid), processors), chain, 1, 0)
    # Whole clusters of 4 and 8 do not fill every cluster of multiprocessors.
    busiest = cdiv(tiles * split, processors if split <= 2 else processors * 10 // 11)
    waves = cdiv(busiest, shape.ctas)
    return Work(busiest * cdiv(groups, split), waves * cdiv(groups, split), waves, 0)


def microseconds(
    form: Format,
    shape: Shape,
    partition: Partition,
    m: int,
    n: int,
    k: int,
    processors: int,
    costs: Costs | None = None,
) -> float:
    """Expected time: the products of the busiest multiprocessor, the longest CTA, or memory, plus the cost of launch and reduction.

    costs: None for those in `COSTS`.
    """
    costs = costs or COSTS[shape[:4]]
    group, late = costs.group, costs.late
    if shape.mt <= 64:  # where decoding counts
        decoding = form.cost["gemm_ws"][0]
        group, late = group * decoding**0.5, late * decoding**0.5
    across, down = cdiv(n, shape.c * 64), cdiv(m, shape.mt)
    work = _waves(shape, partition, across * down, cdiv(k, 128), processors)
    weight = cdiv(n, 16) * cdiv(k, 128) * form.tile_bytes
    memory = (weight + 2 * m * (n + k)) / 4.3e6
    cache = 0.0
    for size, times in ((2 * m * k, across), (weight, down)):
        # Operands that fit stay in L2. CTAs at different positions along K share no other reads.
        lost = work.apart if size > L2_BYTES / 2 else 0.0
        cache += size * times * (lost / 4.3e6 + (1 - lost) / (7.5e6 if shape.slices == 1 else 10.5e6))
    time = ((work.busiest * group) ** 6 + (work.chain * late) ** 6 + memory**6 + cache**6) ** (1 / 6)
    time *= 1 + costs.hot * min(1.0, time / 300)
    sums = (
        costs.cluster + costs.doubling * log2(partition.split)
        if partition.split > 1
        else costs.deal + costs.part * work.dealt
        if work.dealt
        else 0.0
    )
    further = work.chain // cdiv(k, 128) - 1
    hidden = _STORE * max(0, further) if partition.lag and form.bits == 8 else 0.0
    return float(time + costs.start + sums + costs.wave * (work.waves - 1) - hidden)


def described(form: Format, config: Config) -> tuple[Shape, Partition]:
    """The shape and the partition of a configuration."""
    of = {shape[:4]: shape for shape in shapes_of(form)}
    shape = of[int(config["mt"]), int(config["c"]), int(config["slices"]), int(config["ctas"])]
    return shape, Partition(*(int(config[name]) for name in Partition._fields))


def expected(form: Format, config: Config, m: int, n: int, k: int, processors: int) -> float:
    """`microseconds` of a configuration."""
    return microseconds(form, *described(form, config), m, n, k, processors)


def misfit(form: Format, config: Config, m: int, k: int) -> str | None:
    """Why a configuration does not run a problem, None if it does: entry.h checks the same. It is one of this schedule."""
    slices, split = int(config["slices"]), int(config["split"])
    return None if _shared(slices, split, k) else f"{split} CTAs of {slices} slices cannot share K = {k}"


def _shared(slices: int, split: int, k: int) -> bool:
    """Whether each slice of each CTA along K has a group of it. A CTA of one slice may have none."""
    return slices == 1 or cdiv(k, 128) // split >= slices


def divides(split: int, shape: Shape) -> bool:
    """Whether `split` CTAs of a cluster can each add up as many of a warpgroup's fragments of 8 rows."""
    return shape.mt // 8 // shape.slices % split == 0


def candidates(form: Format, m: int, n: int, k: int, processors: int) -> Iterator[tuple[Shape, Partition]]:
    """Shapes and partitions that give every CTA work."""
    groups = cdiv(k, 128)
    for shape in shapes_of(form):
        if shape.mt > 32 and shape.mt // 2 >= m:
            continue  # half the rows suffice
        if shape.mt < 128 and shape.mt * 4 < m:
            continue  # weights would be decoded too often
        tiles, full = cdiv(n, shape.c * 64) * cdiv(m, shape.mt), processors * shape.ctas
        if shape.slices > 1:  # one tile per CTA
            for split in (1, 2, 4, 8):
                if (
                    tiles * split <= 2 * processors
                    and _shared(shape.slices, split, k)
                    and divides(split, shape)
                ):
                    yield shape, Partition(split, 0, full)
            continue
        lags = (0, *lags_of(form, shape)) if tiles > full else (0,)
        for lag in lags:
            yield shape, Partition(1, 0, full, lag)
        for grid in sorted({processors, full}):
            if tiles % grid and tiles * groups >= grid:
                beyond = (2,) if tiles > grid and tiles % grid * groups >= grid else ()
                for even in (1, *beyond):
                    for lag in lags:
                        yield shape, Partition(1, even, grid, lag)
        for split in (2, 4, 8):
            if m <= shape.mt * 2 and groups >= split and divides(split, shape):
                yield shape, Partition(split, 0, full)


def config_of(form: Format, shape: Shape, partition: Partition, m: int, n: int, k: int) -> dict[str, int]:
    high = cdiv(m, shape.mt)
    if high <= 2 and cdiv(n, 16) * cdiv(k, 128) * form.tile_bytes <= RESIDENT:
        high = 1  # all CTAs read the same rows of x at the same time
    raster = max(1, min(high, BAND, BAND_BYTES // (k * 2 * shape.mt)))
    return {
        "mt": shape.mt,
        "c": shape.c,
        "slices": shape.slices,
        "ctas": shape.ctas,
        "raster": raster,
        **partition._asdict(),
    }


@lru_cache(maxsize=4096)
def ranked(form: Format, m: int, n: int, k: int, processors: int) -> tuple[tuple[float, dict[str, int]], ...]:
    """(microseconds, configuration) of the candidates, best first; ties in the order of `candidates`."""
    costs = [
        (
            microseconds(form, shape, partition, m, n, k, processors),
            config_of(form, shape, partition, m, n, k),
        )
        for shape, partition in candidates(form, m, n, k, processors)
    ]
    return tuple(sorted(costs, key=lambda pair: pair[0]))
