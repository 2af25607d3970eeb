"""Products of experts on block-scaled codes for sm_120: which problems they are made for, the parts of a workspace, and which shape of a CTA suits a
number of rows per expert.

The shapes are those of linear. Nothing of it was measured: tuning measures the candidates.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernels.linear.block_scaled_sm120.shapes import COLUMNS, SHAPES, Shape

MAX_EXPERTS = 1024
PROCESSORS = 48
"""Multiprocessors of a target that does not say how many it has: those of a GB10."""


def refusal(x: str, experts: int, hidden: int, inner: int) -> str | None:
    """Why experts of these sizes are not multiplied; None if they are."""
    if x not in ("fp16", "bf16"):
        return f"takes fp16 or bf16 activations, not {x}"
    if experts > MAX_EXPERTS:
        return f"made for up to {MAX_EXPERTS} experts, not {experts}"
    if hidden % COLUMNS or inner % COLUMNS:
        return f"copies {COLUMNS} columns at a time: needs H and I multiples of {COLUMNS}, got H={hidden}, I={inner}"
    if experts * max(2 * inner, hidden) >= 2**31:
        return f"numbers the rows of all experts in int32, and {experts} experts of {max(2 * inner, hidden)} rows have more"
    return None


def shared_bytes(shape: Shape, format: str, experts: int) -> int:
    """Dynamic shared memory of a CTA: that of linear, the list of tiles, and the factors of a tile's rows of x."""
    return shape.shared_bytes(format) + 8 * (experts + 1) + 4 * shape.mt


class Rows(NamedTuple):
    """Bytes of quantized rows: of codes, of scales, of factors."""

    codes: int
    scales: int
    factors: int


def rows_bytes(format: str, rows: int, k: int) -> Rows:
    """The parts of `rows` rows of K columns; only nvfp4 has factors."""
    scheme = QuantScheme.parse(format)
    return Rows(rows * scheme.code_bytes(k), rows * scheme.groups(k), 4 * rows if scheme.has_global else 0)


def configs(format: str, rows: int, experts: int, processors: int | None) -> Iterator[Config]:
    """Configurations of a product for `rows` rows in all: first the shape whose tiles an expert's rows fill on average, then the others."""
    share = min(rows / experts, SHAPES[format][-1].mt)
    for shape in sorted(SHAPES[format], key=lambda shape: (shape.mt < share, shape.mt)):
        yield {
            "mt": shape.mt,
            "warps": shape.warps,
            "grid": (processors or PROCESSORS) * shape.ctas,
        }
