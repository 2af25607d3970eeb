"""The schedule `grouped_ws`: compiled formats and CTA shapes, and which of them suits a number of rows per expert."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.scheme import QuantScheme, cdiv


class Format(NamedTuple):
    """A compiled weight format: its name in the library, the schemes that are stored so, bytes per tile of 16 rows x 128 columns."""

    name: str
    schemes: tuple[str, ...]
    tile_bytes: int


FORMATS = (
    Format("int4_g128", ("int4_g128", "int4_ch"), 1056),
    Format("mxfp4", ("mxfp4",), 1088),
)
"""Formats of linear's table of instances, `linear/frag16_sm90/instances.json`, that grouped products are compiled for."""
MAX_EXPERTS = 1024
TILE_ROWS, BLOCK_ROWS, TILE_K = 16, 64, 128


class Shape(NamedTuple):
    """A CTA: rows of x, blocks of 64 rows of W, warpgroups that alternate along K for each of those, CTAs per SM."""

    mt: int
    c: int
    slices: int
    ctas: int


SHAPES = (
    Shape(8, 2, 2, 1),
    Shape(8, 1, 4, 1),
    Shape(8, 2, 1, 2),
    Shape(16, 2, 1, 2),
    Shape(32, 2, 1, 2),
    Shape(64, 2, 1, 2),
    Shape(128, 2, 1, 1),
)
"""Those of `GM_SHAPES` in entry.h."""


def format_of(scheme: QuantScheme) -> Format | None:
    """The compiled format that holds a scheme."""
    return next((form for form in FORMATS if scheme.name in form.schemes), None)


def refusal(scheme: QuantScheme, x: str, experts: int, n: int, k: int, silu_mul: bool) -> str | None:
    """Why [experts, n, k] weights of a scheme are not multiplied with activations of dtype `x`; None if they are."""
    if format_of(scheme) is None:
        known = ", ".join(name for form in FORMATS for name in form.schemes)
        return f"multiplies weight-only formats, compiled for {known}, not {scheme}"
    if x not in ("fp16", "bf16"):
        return f"takes fp16 or bf16 activations, not {x}"
    if experts > MAX_EXPERTS:
        return f"made for up to {MAX_EXPERTS} experts, not {experts}"
    if k % 8:
        return f"reads rows of x in pieces of 8 numbers, and K = {k} is not a multiple of 8"
    if silu_mul and n % (2 * TILE_ROWS):
        return f"silu_mul needs gate and up of whole tiles of {TILE_ROWS} rows, not N = {n}"
    return None


def misfit(slices: int, c: int, k: int, silu_mul: bool) -> str | None:
    """Why a shape with so many slices and blocks does not multiply by [N, K]; None if it does. entry.h checks the same."""
    if cdiv(k, TILE_K) < slices:
        return f"{slices} warpgroups that share K need one group of {TILE_K} each, and K = {k} has {cdiv(k, TILE_K)}"
    if silu_mul and c != 2:
        return f"silu_mul needs a CTA of gate and up, 2 blocks of {BLOCK_ROWS} rows, not {c}"
    return None


def misfit_of(config: Config, number: str, k: int, silu_mul: bool) -> str | None:
    """`misfit` of the shape whose fields in a configuration end with a number."""
    return misfit(int(config[f"slices{number}"]), int(config[f"c{number}"]), k, silu_mul)


def shapes_for(k: int, silu_mul: bool) -> Iterator[Shape]:
    """The shapes that can multiply by [N, K]."""
    for shape in SHAPES:
        if misfit(shape.slices, shape.c, k, silu_mul) is None:
            yield shape


def shape_for(rows: int, experts: int, n: int, k: int, silu_mul: bool, processors: int) -> Shape:
    """The shape for `rows` rows in all, by the rows that an expert has on average.

    Measured on an H200 (docs/performance/log/moe_hopper.md). With few rows, warpgroups share the K of a tile where there are fewer tiles
    than multiprocessors.
    """
    share = rows / experts
    tiles = min(rows, experts) * cdiv(n, 2 * BLOCK_ROWS)
    few = Shape(8, 2, 1, 2)
    if 2 * tiles <= processors:
        few = Shape(8, 1, 4, 1)
    if 2 * tiles > processors >= tiles or silu_mul and 2 * tiles <= processors:
        few = Shape(8, 2, 2, 1)
    wanted = (
        few
        if share <= 4
        else Shape(16, 2, 1, 2)
        if share <= 8
        else Shape(32, 2, 1, 2)
        if share <= 24
        else Shape(64, 2, 1, 2)
        if share <= 96
        else Shape(128, 2, 1, 1)
    )
    return wanted if wanted in shapes_for(k, silu_mul) else Shape(8, 2, 1, 2)


def config_of(form: Format, shape: Shape, processors: int) -> Config:
    """What `_launch` needs."""
    return {
        "format": form.name,
        "tile_bytes": form.tile_bytes,
        **shape._asdict(),
        "grid": processors * shape.ctas,
    }
