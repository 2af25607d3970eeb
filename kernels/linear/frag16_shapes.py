"""Shapes of a CTA of the decode kernels over frag16 tiles, which of them fit a problem, and a model of their time on an H200."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import log2
from typing import NamedTuple

from gristmill.kernel_registry.scheme import QuantScheme

ROWS = 16
"""Rows of x a launch."""
SHARED_BYTES = 227 * 1024
_KEPT_BYTES, _MAX_DEPTH = 1024, 16


class Shape(NamedTuple):
    """A CTA: columns of x in eights, 16-row tiles a warp, tiles a slot, warps along N and K, slots of x, CTAs a multiprocessor."""

    nt: int
    rt: int
    slot: int
    wn: int
    wk: int
    nx: int
    ctas: int


FEW = tuple(
    Shape(*values)
    for values in (
        (1, 4, 4, 1, 8, 4, 2), (1, 4, 4, 1, 4, 4, 4), (1, 2, 2, 1, 16, 4, 1), (1, 8, 4, 1, 4, 4, 4),
        (2, 4, 4, 1, 8, 3, 1), (2, 4, 4, 2, 4, 2, 2), (2, 4, 4, 1, 4, 2, 3), (2, 2, 2, 1, 8, 3, 2),
    )
)  # fmt: skip
ALL = FEW + tuple(
    Shape(*values)
    for values in (
        (1, 4, 4, 1, 12, 4, 1), (1, 7, 7, 1, 4, 4, 4), (1, 8, 4, 1, 8, 4, 2), (1, 2, 2, 1, 8, 4, 2), (1, 4, 4, 1, 16, 4, 1),
        (2, 2, 2, 1, 16, 2, 1), (2, 8, 4, 1, 8, 2, 1), (2, 7, 7, 2, 4, 3, 1), (2, 7, 7, 1, 8, 2, 1), (2, 2, 2, 2, 8, 2, 1),
    )
)  # fmt: skip
"""GM_FEW and GM_ALL of `_linear_frag16_entry_sm90.h`."""


class Format(NamedTuple):
    """A compiled weight format: its name in the library, bytes of a tile, and the decoding of a tile as a multiple of int4_g128's."""

    name: str
    tile_bytes: int
    decoding: float


_DECODING = {"int4_g64": 1.1, "int4_g32": 1.25, "int4_g128_zp": 1.1, "int4_g64_zp": 1.2, "int4_g32_zp": 1.4,
             "mxfp4": 1.15, "nvfp4": 1.2, "int8": 2.0, "fp8": 1.6}  # fmt: skip


def format_of(scheme: QuantScheme) -> Format:
    """The format that holds a scheme: one scale a row is stored as one for each 128 columns."""
    name = scheme.weights.replace("_ch", "_g128") if scheme.bits == 4 else "int8" if scheme.is_integer else "fp8"
    scale = {"e4m3": 1, "e8m0": 1, "bf16": 2}.get(str(scheme.scale_dtype), 4)
    groups = max(1, 128 // scheme.group_size) if scheme.group_size else 1
    return Format(name, 256 * scheme.bits + 16 * groups * (scale + scheme.zero_points), _DECODING.get(name, 1.0))


DEPTHS = (2, 3, 1, 4)
"""Slots of a warp's ring, what is usually best first: the cost model tells depths apart by shared memory alone, so the first one
that fits as many CTAs wins. In 33 problems timed at all of them on an H200 (bench/results/h200/kernelbench/regret_linear.json)
the default is 4 % behind the best candidate with 2 first, by geometric mean, and 9.5 % with 1 first."""


def shapes_of(form: Format, x: str) -> tuple[Shape, ...]:
    """The instances for activations of dtype `x`."""
    return ALL if x == "bf16" and form.name in ("int4_g128", "mxfp4", "nvfp4") else FEW


def ceil(a: int, b: int) -> int:
    return -(-a // b)


def slots(shape: Shape, k: int, split: int, depth: int) -> int:
    """Slots of a ring that is asked to have `depth`: whole steps along K, and no more than there are."""
    sub = ceil(shape.rt, shape.slot)
    chunks = ceil(ceil(ceil(k, 128), split), shape.wk) * sub
    return min(max(min(depth, chunks) // sub * sub, sub), _MAX_DEPTH // sub * sub)


def shared_bytes(shape: Shape, tile_bytes: int, m: int, k: int, split: int, depth: int) -> int:
    """Dynamic shared memory of a CTA, the same sum as in `_linear_frag16_entry_sm90.h`."""
    warps, depth = shape.wn * shape.wk, slots(shape, k, split, depth)
    rings = warps * depth * shape.slot * tile_bytes + shape.wk * shape.nx * m * 256
    sums = warps * shape.rt * shape.nt * 512
    return max(rings, sums) + (shape.wn * shape.rt * shape.nt * 512 if split > 1 else 0)


def candidates(form: Format, x: str, m: int, n: int, k: int) -> Iterator[tuple[Shape, int, int, int]]:
    """(shape, split, depth, shared bytes) that fit and leave no warp without work, each once: depths that make the same ring
    are one. m is at most 16."""
    need = 1 if m <= 8 else 2
    groups, tiles = ceil(k, 128), ceil(n, 16)
    for shape in shapes_of(form, x):
        if shape.nt != need:
            continue
        for split in (1, 2, 4, 8):
            if split > 1 and (groups < split * shape.wk or ceil(tiles, shape.rt * shape.wn) * split > 4096):
                continue
            rings: set[int] = set()
            for depth in DEPTHS:
                if (ring := slots(shape, k, split, depth)) in rings:
                    continue
                rings.add(ring)
                size = shared_bytes(shape, form.tile_bytes, m, k, split, depth)
                if size + shape.wn * shape.wk * _MAX_DEPTH * 8 + _KEPT_BYTES <= SHARED_BYTES:
                    yield shape, split, depth, size


_COSTS = {
    1: (0.0865, 0.0791, 0.0988, 0.8579, 0.9834, 1.135, 1.0793, 0.0069),
    2: (0.129, 0.1286, 0.1943, 0.4529, 0.7789, 1.0421, 1.4271, 0.0),
}
"""Microseconds, by columns of x in eights, fitted to 702 measurements of int4_g128 on an H200: a tile and a group of the busiest
scheduler; a tile and a group of one warp; the launch; a doubling of split; a wave; a row of x a group."""


def microseconds(
    form: Format, shape: Shape, split: int, size: int, m: int, n: int, k: int, processors: int
) -> float:
    """Expected time of one launch: the busiest scheduler, the longest warp, or memory, and what each launch costs."""
    tile, group, warp_tile, warp_group, start, doubling, wave, row = _COSTS[shape.nt]
    warps = shape.wn * shape.wk
    steps = ceil(ceil(ceil(k, 128), split), shape.wk)
    ctas = ceil(ceil(n, 16), shape.rt * shape.wn) * split
    resident = max(1, min(shape.ctas, SHARED_BYTES // (size + 2 * _KEPT_BYTES)))
    # Whole clusters of 4 and 8 do not fill every cluster of multiprocessors.
    usable = processors if split <= 2 else processors * 10 // 11
    busiest = ceil(ctas, usable)
    waves = ceil(busiest, resident)
    work = busiest * warps / 4 * steps * (shape.rt * tile * form.decoding + group + row * m / shape.wn)
    latency = waves * steps * (shape.rt * warp_tile * form.decoding + warp_group)
    memory = ceil(n, 16) * ceil(k, 128) * form.tile_bytes / 4.3e6
    slowest: float = (work**6 + latency**6 + memory**6) ** (1 / 6)
    return slowest + start + doubling * log2(split) + wave * waves


@lru_cache(maxsize=4096)
def ranked(form: Format, x: str, m: int, n: int, k: int, processors: int) -> tuple[tuple[float, dict[str, int]], ...]:
    """(microseconds, configuration) of the candidates for one launch, best first; ties in the order of `candidates`."""
    rows = min(max(m, 1), ROWS)
    found = [
        (microseconds(form, shape, split, size, rows, n, k, processors), config_of(shape, split, depth))
        for shape, split, depth, size in candidates(form, x, rows, n, k)
    ]
    return tuple(sorted(found, key=lambda pair: pair[0]))


def config_of(shape: Shape, split: int, depth: int) -> dict[str, int]:
    return {"nt": shape.nt, "rt": shape.rt, "wn": shape.wn, "wk": shape.wk, "split": split, "depth": depth}
