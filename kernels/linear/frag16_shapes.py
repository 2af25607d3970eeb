"""Shapes of a CTA of the decode kernels over frag16 tiles whose warps copy for themselves, which of them fit a problem, and a model of their
time on an H200."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import ceil as ceil_of
from math import log2
from typing import NamedTuple

from gristmill.kernel_registry.scheme import QuantScheme

ROWS = 16
"""Rows of x a launch."""
SHARED_BYTES = 227 * 1024
_MULTIPROCESSOR_BYTES = 228 * 1024
_KEPT_BYTES, _MAX_DEPTH = 1024, 16


class Shape(NamedTuple):
    """A CTA: columns of x in eights, 16-row tiles a warp, tiles a slot, warps, slots of x, CTAs a multiprocessor."""

    nt: int
    rt: int
    slot: int
    wk: int
    nx: int
    ctas: int


FEW = tuple(
    Shape(*values)
    for values in (
        (1, 4, 4, 8, 4, 2),
        (1, 4, 4, 4, 4, 4),
        (1, 2, 2, 16, 4, 1),
        (1, 8, 4, 4, 4, 4),
        (2, 2, 2, 8, 3, 2),
    )
)
ALL = FEW + tuple(
    Shape(*values)
    for values in (
        (1, 4, 4, 12, 4, 1),
        (1, 8, 4, 8, 4, 2),
        (1, 2, 2, 8, 4, 2),
        (1, 4, 4, 16, 4, 1),
        (2, 2, 2, 16, 2, 1),
    )
)
"""GM_FEW and GM_ALL of `_linear_frag16_entry_sm90.h`."""


class Format(NamedTuple):
    """A compiled weight format: its name in the library, bytes of a tile, and the decoding of a tile as a multiple of int4_g128's."""

    name: str
    tile_bytes: int
    decoding: float


_DECODING = {
    "int4_g64": 1.1,
    "int4_g32": 1.25,
    "int4_g128_zp": 1.1,
    "int4_g64_zp": 1.2,
    "int4_g32_zp": 1.4,
    "mxfp4": 1.15,
    "nvfp4": 1.2,
    "int8": 2.0,
    "fp8": 1.6,
}


def format_of(scheme: QuantScheme) -> Format:
    """The format that holds a scheme: one scale a row is stored as one for each 128 columns."""
    name = (
        scheme.weights.replace("_ch", "_g128") if scheme.bits == 4 else "int8" if scheme.is_integer else "fp8"
    )
    scale = {"e4m3": 1, "e8m0": 1, "bf16": 2}.get(str(scheme.scale_dtype), 4)
    groups = max(1, 128 // scheme.group_size) if scheme.group_size else 1
    return Format(
        name, 256 * scheme.bits + 16 * groups * (scale + scheme.zero_points), _DECODING.get(name, 1.0)
    )


DEPTHS = (2, 3, 1, 4)
"""Slots of a warp's ring, what is usually best first: where the cost model sees no difference, the first one counts."""


WHOLE = ("int4_g128", "int4_g128_zp", "mxfp4", "nvfp4", "int8", "fp8")
"""Formats with all instances, in each of the families."""


def shapes_of(form: Format) -> tuple[Shape, ...]:
    """The instances of a format."""
    return ALL if form.name in WHOLE else FEW


def ceil(a: int, b: int) -> int:
    return -(-a // b)


def slots(shape: Shape, k: int, split: int, depth: int) -> int:
    """Slots of a ring that is asked to have `depth`: whole steps along K, and no more than there are."""
    sub = shape.rt // shape.slot
    chunks = ceil(ceil(ceil(k, 128), split), shape.wk) * sub
    return min(max(min(depth, chunks) // sub * sub, sub), _MAX_DEPTH // sub * sub)


def shared_bytes(shape: Shape, tile_bytes: int, m: int, k: int, split: int, depth: int) -> int:
    """Dynamic shared memory of a CTA, the same sum as in `_linear_frag16_entry_sm90.h`."""
    rings = shape.wk * (slots(shape, k, split, depth) * shape.slot * tile_bytes + shape.nx * m * 256)
    return max(rings, (shape.wk + (split > 1)) * shape.rt * shape.nt * 512)


def candidates(form: Format, m: int, n: int, k: int) -> Iterator[tuple[Shape, int, int, int]]:
    """(shape, split, depth, shared bytes) that fit and leave no warp without work, each once: depths that make the same ring
    are one. m is at most 16."""
    need = 1 if m <= 8 else 2
    groups, tiles = ceil(k, 128), ceil(n, 16)
    for shape in shapes_of(form):
        if shape.nt != need:
            continue
        for split in (1, 2, 4, 8):
            if split > 1 and (groups < split * shape.wk or ceil(tiles, shape.rt) * split > 4096):
                continue
            rings: set[int] = set()
            for depth in DEPTHS:
                if (ring := slots(shape, k, split, depth)) in rings:
                    continue
                rings.add(ring)
                size = shared_bytes(shape, form.tile_bytes, m, k, split, depth)
                if size + shape.wk * _MAX_DEPTH * 8 + _KEPT_BYTES <= SHARED_BYTES:
                    yield shape, split, depth, size


class _Costs(NamedTuple):
    """Microseconds of what a launch consists of, for 8 or 16 columns of x.

    tile, group: of a multiprocessor's busiest scheduler; warp_tile, warp_group: of one warp, and alone: more where a ring of one
    step is filled only once it was used up; launch; doubling: of split; round: of CTAs; row: of x, a group. packed: which part of
    the CTAs that an SM has room for it gets although others stand empty; tail: CTAs that an SM is late by where CTAs wait for
    room; power: how well the parts overlap.
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
"""By columns of x in eights; fitted, with the two tables below, to 4,250 times on an H200: every candidate of 61 problems
(bench/results/h200/kernelbench/regret_linear.json), and the best of 195 others of that time."""

_DECODED = {
    1: {
        "int4_g128": 0.92,
        "int4_g64": 0.95,
        "int4_g32": 0.96,
        "int4_g128_zp": 1.01,
        "int4_g64_zp": 1.22,
        "int4_g32_zp": 1.54,
        "mxfp4": 1.39,
        "nvfp4": 1.62,
        "int8": 1.76,
        "fp8": 0.69,
    },
    2: {
        "int4_g128": 0.90,
        "int4_g64": 1.09,
        "int4_g32": 1.18,
        "int4_g128_zp": 1.09,
        "int4_g64_zp": 1.18,
        "int4_g32_zp": 1.47,
        "mxfp4": 1.12,
        "nvfp4": 1.12,
        "int8": 1.88,
        "fp8": 0.87,
    },
}
"""The time of a tile of a format, as a multiple of `_Costs.tile` and `_Costs.warp_tile`."""

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
"""What an instance (nt, rt, wk) takes next to what the model says."""


def microseconds(
    form: Format, shape: Shape, split: int, depth: int, size: int, m: int, n: int, k: int, processors: int
) -> float:
    """Expected time of one launch: the busiest scheduler, the longest warp, or memory, and what each launch costs.

    Where a multiprocessor has room for more CTAs than its share, the hardware fills some and leaves others empty: the busiest
    one has as many as fit, not the average. A deeper ring, for which fewer fit, is faster then; so is a grid that does not fit
    at once, whose CTAs go wherever one has ended.
    """
    costs, decoding = _COSTS[shape.nt], _DECODED[shape.nt][form.name]
    steps = ceil(ceil(ceil(k, 128), split), shape.wk)
    ctas = ceil(ceil(n, 16), shape.rt) * split
    # Whole clusters of 4 and 8 do not fill every cluster of multiprocessors.
    average = ctas / (processors if split <= 2 else processors * 10 // 11)
    room = max(1, min(shape.ctas, _MULTIPROCESSOR_BYTES // (size + shape.wk * _MAX_DEPTH * 8 + _KEPT_BYTES)))
    if room >= ceil_of(average):
        rounds, busiest = 1.0, ceil_of(average) + costs.packed * (min(room, ctas) - ceil_of(average))
    else:
        rounds, busiest = (average + costs.tail) / room, average + costs.tail
    alone = costs.alone if slots(shape, k, split, depth) == shape.rt // shape.slot and steps > 1 else 0.0
    work = busiest * shape.wk / 4 * steps * (shape.rt * costs.tile * decoding + costs.group + costs.row * m)
    latency = rounds * steps * (shape.rt * costs.warp_tile * decoding + costs.warp_group + alone)
    memory = ceil(n, 16) * ceil(k, 128) * form.tile_bytes / 4.3e6
    slowest = float((work**costs.power + latency**costs.power + memory**costs.power) ** (1 / costs.power))
    slowest *= _INSTANCES[shape.nt, shape.rt, shape.wk]
    return slowest + costs.launch + costs.doubling * log2(split) + costs.round * rounds


@lru_cache(maxsize=4096)
def ranked(form: Format, m: int, n: int, k: int, processors: int) -> tuple[tuple[float, dict[str, int]], ...]:
    """(microseconds, configuration) of the candidates for one launch, best first; ties in the order of `candidates`."""
    rows = min(max(m, 1), ROWS)
    found = [
        (
            microseconds(form, shape, split, depth, size, rows, n, k, processors),
            config_of(shape, split, depth),
        )
        for shape, split, depth, size in candidates(form, rows, n, k)
    ]
    return tuple(sorted(found, key=lambda pair: pair[0]))


def config_of(shape: Shape, split: int, depth: int) -> dict[str, int]:
    return {"nt": shape.nt, "rt": shape.rt, "wk": shape.wk, "split": split, "depth": depth}
