"""Grouped linear for sm_80 and newer: which shapes of a CTA there are, and which suits a number of rows per expert.

Nothing of it was measured on a GPU before sm_90: tuning measures the candidates.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernels.linear.frag16_sm80.formats import FORMATS, Format, format_of
from gristmill.kernels.linear.frag16_sm80.gemm import SMALL_TILE

TILE_LAYOUTS = ("w4_frag16_v1", "f4_frag16_v1", "w8_frag16_v1", "gguf_frag16_v1")
MAX_EXPERTS = 1024
TILE_ROWS = 16
USUAL = ("int4_g128", "mxfp4")
"""Formats that every build has; the sources of the others are marked rare."""
PROCESSORS = 108
"""Multiprocessors of a target that does not say how many it has."""


class Shape(NamedTuple):
    """A CTA: rows of x, warps of two tiles of W each, slots of x (64 k) and of weights (128 k), how many a multiprocessor's registers hold."""

    mt: int
    warps: int
    nx: int
    nw: int
    ctas: int


SHAPES = {
    "small": (Shape(16, 4, 5, 3, 3), Shape(32, 4, 5, 3, 3), Shape(64, 4, 5, 3, 2), Shape(128, 8, 3, 2, 1)),
    "large": (Shape(16, 4, 3, 2, 3), Shape(32, 4, 3, 2, 2), Shape(64, 4, 3, 2, 2), Shape(80, 4, 3, 2, 1)),
}
"""By size of the tiles; entry.h has the same."""


def shapes_of(form: Format) -> tuple[Shape, ...]:
    """The shapes that are compiled for a format."""
    return SHAPES["small" if form.tile_bytes <= SMALL_TILE else "large"]


def shared_bytes(shape: Shape, form: Format, experts: int) -> int:
    """Dynamic shared memory of a CTA: the slots of x and of weights, and the list of tiles."""
    return shape.nx * shape.mt * 128 + shape.warps * shape.nw * 2 * form.tile_bytes + 8 * (experts + 1)


def refusal(scheme: QuantScheme, x: str, experts: int, n: int, k: int, silu_mul: bool) -> str | None:
    """Why [experts, n, k] weights of a scheme are not multiplied with activations of dtype `x`; None if they are."""
    if format_of(scheme) is None:
        known = ", ".join(dict.fromkeys(name for form in FORMATS for name in form.schemes))
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


def sources_of(scheme: QuantScheme) -> tuple[str, ...]:
    """The rare sources that hold a scheme, by name without suffix: of K-quants two, for scales of 16 bits and for products."""
    forms = (format_of(scheme, factored) for factored in (False, True))
    return tuple(
        f"_grouped_linear_{form.name}_rare_sm80" for form in forms if form and form.name not in USUAL
    )


def config_of(form: Format, shape: Shape, processors: int) -> Config:
    """What `_launch` needs."""
    return {
        "format": form.name,
        "tile_bytes": form.tile_bytes,
        "mt": shape.mt,
        "warps": shape.warps,
        "grid": processors * shape.ctas,
    }


def configs(scheme: QuantScheme, rows: int, experts: int, processors: int | None) -> Iterator[Config]:
    """Configurations for `rows` rows in all: first the shape whose tiles an expert's rows fill on average, then the others."""
    form = format_of(scheme)
    if form is None:
        raise ValueError(f"grouped linear for sm_80: not compiled for {scheme}")
    share = min(rows / experts, shapes_of(form)[-1].mt)
    for shape in sorted(shapes_of(form), key=lambda shape: (shape.mt < share, shape.mt)):
        yield config_of(form, shape, processors or PROCESSORS)
