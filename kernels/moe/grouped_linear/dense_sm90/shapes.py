"""The schedule of `product.cuh`: its instances, and which of them suits a number of rows per expert."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.scheme import QuantScheme, cdiv

TYPES = ("fp16", "bf16")
MAX_EXPERTS = 1024
STEP, BLOCK_ROWS = 64, 64
"""Columns of a slot, rows of W of a wgmma."""
INFOS = 32
"""Tile coordinates that wait for their readers, 16 bytes each."""
MOST_SHARED, PROCESSOR_BYTES, RESERVED = 232448, 233472, 1024
"""Bytes of shared memory: of a CTA, of a multiprocessor, and of it for each CTA."""
PROCESSORS = 132


class Shape(NamedTuple):
    """An instance.

    Attributes:
        mt: rows of x of a tile, at most.
        blocks: of up to 64 rows of W, of a warpgroup.
        groups: warpgroups with blocks of their own.
        slices: warpgroups that take turns along K for each of those.
        cluster: CTAs with neighbouring rows of W and the same rows of x.
        ctas: per multiprocessor.
        slots: of the ring.
        staged: rows of y that a warpgroup stages at a time.
        widths: rows of x at which a tile may be multiplied.
    """

    mt: int
    blocks: int
    groups: int
    slices: int
    cluster: int
    ctas: int
    slots: int
    staged: int
    widths: tuple[int, ...]

    @property
    def w_blocks(self) -> int:
        """Blocks of rows of W of a tile."""
        return self.blocks * self.groups

    @property
    def threads(self) -> int:
        """Of a CTA: those that multiply and a warpgroup that copies."""
        return (self.groups * self.slices + 1) * 128

    @property
    def box(self) -> int:
        """Rows of x that are copied at a time."""
        return 32 if self.mt >= 128 else 16 if self.mt >= 64 else 8

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread that multiplies and of one that copies, as `params.h` has them."""
        small = self.groups * self.slices == 4 or self.ctas == 2
        many = 112 if self.groups * self.slices == 4 else 104 if self.ctas == 2 else 232
        return many, 32 if small else 40

    def shared(self, experts: int) -> int:
        """Bytes of shared memory of a CTA, as the library answers."""
        slot = (self.w_blocks * BLOCK_ROWS + self.mt) * STEP * 2 + 16
        exchange = (self.slices - 1) * self.groups * (self.blocks * self.mt // 2 * 512)
        staging = self.groups * 2 * self.staged * 128
        return self.slots * slot + staging + exchange + INFOS * 16 + 8 * (experts + 1)

    def width_of(self, rows: int) -> int:
        """The width at which a tile with so many rows is multiplied."""
        return next(width for width in self.widths if rows <= width)


SHAPES = (
    Shape(8, 1, 1, 4, 1, 1, 16, 16, (8,)),
    Shape(8, 1, 2, 2, 1, 1, 10, 16, (8,)),
    Shape(16, 1, 2, 1, 1, 2, 5, 16, (8, 16)),
    Shape(32, 1, 2, 1, 1, 2, 4, 32, (8, 16, 32)),
    Shape(64, 1, 2, 1, 1, 2, 4, 16, (16, 32, 64)),
    Shape(64, 2, 2, 1, 1, 1, 5, 32, (16, 32, 64)),
    Shape(128, 1, 2, 1, 1, 1, 6, 32, (32, 64, 80, 96, 128)),
    Shape(128, 2, 2, 1, 1, 1, 4, 32, (32, 64, 80, 96, 128)),
    Shape(160, 2, 2, 1, 1, 1, 4, 32, (32, 64, 96, 128, 160)),
    Shape(160, 2, 2, 1, 2, 1, 4, 32, (32, 64, 96, 128, 160)),
    Shape(256, 1, 2, 1, 1, 1, 4, 32, (32, 64, 96, 128, 160, 192, 224, 256)),
    Shape(256, 1, 2, 1, 2, 1, 4, 32, (32, 64, 96, 128, 160, 192, 224, 256)),
)
"""Those of `GM_SHAPES` in entry.h."""


class Choice(NamedTuple):
    """An instance with what a launch chooses: rows of W of a block, and by how many slots the second warpgroup begins later."""

    shape: Shape
    w_rows: int = BLOCK_ROWS
    lag: int = 0


def choices(k: int, experts: int) -> Iterator[Choice]:
    """Those that can multiply by [experts, N, K].

    Smaller blocks are for few rows of x, whose tiles they spread over the multiprocessors; a lag is for CTAs that have a multiprocessor for
    themselves and much to store.
    """
    for shape in SHAPES:
        if misfit(shape, k) is None and room(shape, experts) is None:
            yield Choice(shape)
            if shape.mt <= 16:
                for w_rows in (48, 32, 16):
                    yield Choice(shape, w_rows)
            elif shape.ctas == 1 and shape.mt >= 128:
                yield Choice(shape, lag=2)


def refusal(w: str, x: str, experts: int, n: int, k: int, silu_mul: bool) -> str | None:
    """Why [experts, n, k] weights of a scheme are not multiplied with activations of dtype `x`; None if they are."""
    scheme = QuantScheme.parse(w)
    if x not in TYPES or str(scheme) != x:
        return f"multiplies fp16 by fp16 and bf16 by bf16, not {scheme} by {x}"
    if experts > MAX_EXPERTS:
        return f"made for up to {MAX_EXPERTS} experts, not {experts}"
    columns = n // 2 if silu_mul else n
    if k % 8 or columns % 8 or silu_mul and n % 2:
        return f"rows of x, W and y must be whole 16 bytes: needs K and y's columns in multiples of 8, got {k} and {columns}"
    return None


def misfit(shape: Shape, k: int) -> str | None:
    """Why a shape does not multiply by K columns; None if it does. entry.h checks the same."""
    if cdiv(k, STEP) < shape.slices:
        return f"{shape.slices} warpgroups that share K need {STEP} columns each, and K = {k} has {cdiv(k, STEP)} times as many"
    return None


def room(shape: Shape, experts: int) -> str | None:
    """Why the shared memory does not hold a shape beside the list of so many experts; None if it does."""
    most = min(MOST_SHARED, PROCESSOR_BYTES // shape.ctas - RESERVED)
    if shape.shared(experts) <= most:
        return None
    return f"a CTA has {most} bytes of shared memory, and {experts} experts need {shape.shared(experts)}"


def named(config: dict[str, int]) -> Shape | None:
    """The shape of a configuration's mt, blocks, groups, slices and cluster; None if there is none."""
    return next((one for one in SHAPES if all(config[name] == getattr(one, name) for name in NAMES)), None)


def misfit_of(config: Config, number: str, k: int, experts: int) -> str | None:
    """Why the shape whose fields in a configuration end with a number does not multiply by [experts, N, K]; None if it does."""
    shape = named({name: int(config[f"{name}{number}"]) for name in NAMES})
    return "no such shape" if shape is None else misfit(shape, k) or room(shape, experts)


NAMES = ("mt", "blocks", "groups", "slices", "cluster")
"""Fields of a shape that name it."""
FIELDS = (*NAMES, "w_rows", "lag", "grid")
"""Of a product's configuration."""


def config_of(choice: Choice, processors: int) -> dict[str, int]:
    """What a launch needs."""
    shape = choice.shape
    return {
        **{name: int(getattr(shape, name)) for name in NAMES},
        "w_rows": choice.w_rows,
        "lag": choice.lag,
        "grid": processors * shape.ctas // shape.cluster * shape.cluster,
    }


# A multiprocessor's clocks, in a second; bytes in a clock from memory and from the L2 cache, and what a slot and a tile take besides. Not
# fitted to times of these kernels: the orders of magnitude are those of linear's kernels on an H200.
CLOCK = 1.6e9
FROM_MEMORY, FROM_L2 = 20.0, 42.0
LEAST_PRODUCT, SLOT, TILE, START = 32, 60, 700, 4000


def microseconds(
    choice: Choice, rows: int, experts: int, n: int, k: int, processors: int, apart: int = 1
) -> float:
    """Expected time of a product of `rows` rows, which experts get at random, by [experts, N, K]; a model, to order choices that have no times.

    apart: rows that are known to have different experts, as those of a token have.
    """
    shape, steps = choice.shape, cdiv(k, STEP)
    active, counts = _shares(rows, experts, apart)
    tile_rows = shape.w_blocks * choice.w_rows
    across = cdiv(n, tile_rows)
    begun = START + LATENCY
    if not active:
        return begun / CLOCK * 1e6
    places = processors * shape.ctas
    tiles = clocks = 0.0
    for count, likely in counts:
        full, last = divmod(count, shape.mt)
        for width, many in ((shape.mt, full), (shape.width_of(last) if last else 0, 1 if last else 0)):
            if not many:
                continue
            product = shape.w_blocks * STEP // 16 * max(width / 2, LEAST_PRODUCT)
            copied = (tile_rows + width / shape.cluster) * STEP * 2 / FROM_L2
            # CTAs of a multiprocessor share it; slices hide each other's waits.
            step = max(product * shape.ctas, copied * shape.ctas, SLOT / shape.slices)
            end = (TILE + width * shape.blocks * 8) * (1.0 if shape.ctas == 1 and not choice.lag else 0.5)
            tiles += active * likely * many * across
            clocks += active * likely * many * across * (steps * step + end)
    busiest = math.ceil(tiles / places) * clocks / tiles
    read = active * n * k * 2 / processors / FROM_MEMORY
    # Where few CTAs read, each of them has so much under way at most.
    under_way = shape.slots * tile_rows * STEP * 2
    alone = math.ceil(tiles / places) * tile_rows * k * 2 * LATENCY / under_way
    together = float(sum(part**OVERLAP for part in (busiest, read, alone)) ** (1 / OVERLAP))
    return (begun + together * (COUPLED if shape.cluster > 1 else 1)) / CLOCK * 1e6


LATENCY, OVERLAP, COUPLED = 1500, 5, 1.02
"""Clocks from a copy's request to its arrival; the power of the sum by which parts of a time hide each other, as in linear's models; what CTAs
of a cluster lose by waiting for each other."""


@lru_cache(maxsize=256)
def _shares(rows: int, experts: int, apart: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """The experts that have rows, on average, and (rows, share of those experts): a few quantiles of rows that are drawn at random, `apart` of
    them of different experts."""
    if rows <= 0:
        return 0.0, ()
    mean = rows / experts
    active = (
        experts * -math.expm1(rows / apart * math.log1p(-apart / experts)) if experts > apart else experts
    )
    of_active = rows / active
    spread = math.sqrt(max(0.0, mean * (1 - 1 / experts)))
    quantiles = (-1.5, -0.8, -0.4, 0.0, 0.4, 0.8, 1.5)
    counts = [max(1, round(of_active + spread * quantile)) for quantile in quantiles]
    return active, tuple((count, 1 / len(counts)) for count in counts)


def ranked(rows: int, experts: int, n: int, k: int, processors: int, apart: int = 1) -> list[Choice]:
    """The choices for `rows` rows in all, the fastest expected first."""
    return sorted(
        choices(k, experts), key=lambda choice: microseconds(choice, rows, experts, n, k, processors, apart)
    )
