"""Which CTA shapes of `grouped.cuh` suit a number of rows per expert."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from gristmill.kernel_registry.scheme import BLOCK, QuantScheme, cdiv
from gristmill.kernels.linear.w8a8_sm90.shapes import (
    CTA_BYTES,
    MOST_SHARED,
    MOST_SLOTS,
    SHARED_BYTES,
    Operands,
    Shape,
)
from gristmill.kernels.linear.w8a8_sm90.shapes import OPERANDS as LINEAR_OPERANDS

OPERANDS = tuple(operands for operands in LINEAR_OPERANDS if not operands.sums)
"""The e4m3 operands of linear."""
SCHEMES = tuple(scheme for operands in OPERANDS for scheme in operands.schemes)
MAX_EXPERTS = 1024

SHAPES = (
    Shape(64, 8, 0, 1, 4),
    Shape(64, 16, 0, 1, 4),
    Shape(128, 16, 0, 2, 2),
    Shape(128, 32, 0, 2, 2),
    Shape(128, 64, 0, 2, 1),
    Shape(128, 128, 1, 2, 1),
    Shape(256, 128, 1, 2, 1),
)
"""The instances: GM_SHAPES of entry.h, and in each the most CTAs of a multiprocessor."""


def operands_of(name: str) -> Operands | None:
    """The operands of a format or scheme; None if there are none."""
    return next((one for one in OPERANDS if name == one.format or name in one.schemes), None)


def refusal(scheme: QuantScheme, x: str, experts: int, n: int, k: int) -> str | None:
    """Why [experts, n, k] weights of a scheme are not multiplied with activations of dtype `x`; None if they are."""
    if str(scheme) not in SCHEMES:
        return f"multiplies {', '.join(SCHEMES)}, not {scheme}"
    if x not in ("fp16", "bf16"):
        return f"takes fp16 or bf16 activations, not {x}"
    if experts > MAX_EXPERTS:
        return f"made for up to {MAX_EXPERTS} experts, not {experts}"
    if k % 16:
        return (
            f"copies rows of whole 16 bytes: needs hidden and inner sizes that are multiples of 16, got {k}"
        )
    if experts * n >= 2**31:
        return f"numbers the rows of all experts' weights in int32, and {experts} times {n} is too many"
    return None


def scale_pitch(operands: Operands, rows: int, experts: int) -> int:
    """Floats from one block of columns to the next in the scales of sorted rows: `scale_pitch` of experts.h."""
    return cdiv(rows, 4) * 4 + (4 * experts if operands.blocks else 0)


def scale_bytes(operands: Operands, rows: int, experts: int, k: int) -> int:
    """Bytes of the scales of sorted rows of K columns."""
    return 4 * scale_pitch(operands, rows, experts) * (cdiv(k, BLOCK) if operands.blocks else 1)


class Choice(NamedTuple):
    """A shape, and how many CTAs of it a multiprocessor has."""

    shape: Shape
    ctas: int


def slots_of(operands: Operands, choice: Choice, experts: int) -> int:
    """Slots of 128 columns of W and x that fit beside the end of a tile and the list of tiles."""
    shape, ctas = choice
    slot = (shape.rows + shape.columns) * BLOCK + (4 * shape.tile_m if operands.blocks else 0) + 16
    room = min(MOST_SHARED, SHARED_BYTES // ctas - CTA_BYTES) - shape.end_bytes - 8 * (experts + 1)
    return min(MOST_SLOTS, room // slot)


def config_of(operands: Operands, choice: Choice, experts: int, processors: int) -> dict[str, int]:
    """What a launch needs of a choice."""
    shape, ctas = choice
    return {
        "tile_a": shape.rows,
        "tile_b": shape.columns,
        "plain": shape.plain,
        "slots": slots_of(operands, choice, experts),
        "ctas": ctas,
        "grid": processors * ctas,
    }


def choices() -> Iterator[Choice]:
    """Every shape with every number of CTAs of a multiprocessor."""
    for shape in SHAPES:
        for ctas in range(1, shape.ctas + 1):
            yield Choice(shape, ctas)


def choice_for(rows: int, experts: int) -> Choice:
    """The choice for `rows` rows in all, by the rows that an expert has on average.

    Weights are read once if a tile has all rows of its expert. Several CTAs of a multiprocessor hide each other's ends of tiles. Entries
    of other ranks' experts count as rows, so that the tiles of a rank of several may be larger than they should be.
    """
    share = cdiv(rows, experts)
    if share <= 4:
        return Choice(SHAPES[0], 4)
    if share <= 8:
        return Choice(SHAPES[2], 2)
    if share <= 24:
        return Choice(SHAPES[3], 2)
    if share <= 64:
        return Choice(SHAPES[4], 1)
    return Choice(SHAPES[5], 1) if share <= 160 else Choice(SHAPES[6], 1)
