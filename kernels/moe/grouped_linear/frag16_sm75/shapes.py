"""Grouped linear for sm_75: which shapes of a CTA there are, and which suits a number of rows per expert.

Nothing of it was measured on a Turing GPU: tuning measures the candidates.
"""

from __future__ import annotations

from collections.abc import Iterator

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernels.linear.frag16_sm75.gemm import Shape, shared_bytes
from gristmill.kernels.linear.frag16_sm80.formats import Format, format_of
from gristmill.kernels.linear.frag16_sm80.gemm import SMALL_TILE
from gristmill.kernels.moe.grouped_linear.frag16_sm80 import shapes as sm80

PROCESSORS = 40
"""Multiprocessors of a target that does not say how many it has: those of a T4."""
SHAPES = {
    "small": (Shape(16, 4, 3), Shape(32, 4, 3), Shape(64, 4, 2)),
    "large": (Shape(16, 4, 2), Shape(32, 4, 2), Shape(64, 4, 1)),
}
"""By size of the tiles; entry.h has the same."""


def shapes_of(form: Format) -> tuple[Shape, ...]:
    """The shapes that are compiled for a format."""
    return SHAPES["small" if form.tile_bytes <= SMALL_TILE else "large"]


def all_shared_bytes(shape: Shape, form: Format, experts: int) -> int:
    """Dynamic shared memory of a CTA: the slots of x and of weights, and the list of tiles."""
    return shared_bytes(shape, form) + 8 * (experts + 1)


def refusal(scheme: QuantScheme, x: str, experts: int, n: int, k: int, silu_mul: bool) -> str | None:
    """Why [experts, n, k] weights of a scheme are not multiplied with activations of dtype `x`; None if they are."""
    if reason := sm80.refusal(scheme, "fp16", experts, n, k, silu_mul):
        return reason
    return None if x == "fp16" else f"takes fp16 activations alone, as Turing's tensor cores do, not {x}"


def configs(scheme: QuantScheme, rows: int, experts: int, processors: int | None) -> Iterator[Config]:
    """Configurations for `rows` rows in all: first the shape whose tiles an expert's rows fill on average, then the others."""
    form = format_of(scheme)
    if form is None:
        raise ValueError(f"grouped linear for sm_75: not compiled for {scheme}")
    share = min(rows / experts, shapes_of(form)[-1].mt)
    for shape in sorted(shapes_of(form), key=lambda shape: (shape.mt < share, shape.mt)):
        grid = (processors or PROCESSORS) * shape.ctas
        sizes = {"mt": shape.mt, "warps": shape.warps, "grid": grid}
        yield {"format": form.name, "tile_bytes": form.tile_bytes, **sizes}
