"""What stands between the products of `moe`: f(gate) · up, or f of every value, with any function of `activation`; in torch, and its error."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gristmill.kernels.activation import activation as functions

if TYPE_CHECKING:
    from torch import Tensor

    from gristmill.kernels.calls import GroupedLinearCall, MoeCall

FUNCTIONS = ("silu", *(name for name in functions.FUNCTIONS if name != "silu"))
"""The first is the default."""


def activation_fits(activation: str, gated: bool, clamp: bool) -> str | None:
    """Why the arguments of the activation do not go together; None if they do."""
    if clamp and (activation != "silu" or not gated):
        return f"clamp limits gate and up of silu, not of {activation}{'' if gated else ' without a gate'}"
    return None


def is_swiglu(call: MoeCall) -> bool:
    """Whether the activation is silu(gate) · up, which the first product has as its epilogue; clamped or not."""
    return call.gated and call.activation == "silu"


def activated(z: Tensor, function: str, gated: bool) -> Tensor:
    """f(gate) · up of z [..., 2 I], gate first, or f(z) of z [..., I], in z's dtype."""
    gate, *up = z.chunk(2, -1) if gated else (z,)
    values = functions.reference(gate, function)
    return values * up[0] if up else values


def activated_error(z: Tensor, size: Tensor, function: str, gated: bool) -> Tensor:
    """The size of an error of `activated` when z has errors of `size`."""
    gate, *up = z.chunk(2, -1) if gated else (z,)
    of_gate, *of_up = size.chunk(2, -1) if gated else (size,)
    # The derivatives of silu and gelu are at most 1.1 and 1.13, that of max(x, 0)² is 2 · max(x, 0).
    slope = 2 * gate.clamp_min(0) if function == "relu2" else 1.15
    if not up:
        return slope * of_gate + 1e-3 * of_gate.square()
    values = functions.reference(gate, function).abs()
    return slope * of_gate * up[0].abs() + of_up[0] * values + 1e-3 * of_gate * of_up[0]


def apart(
    call: MoeCall,
    product: Callable[[GroupedLinearCall], None],
    activate: Callable[[Tensor, Tensor], None],
    space: Tensor | None,
) -> Callable[[GroupedLinearCall], None]:
    """The first product of a chain, with the activation of `call` as a step after it.

    Gate and up are rounded to x's dtype between.

    Args:
        activate: (z [P, rows of w13], out [P, I]); without a gate z may be out.
        space: memory of z; None = new.
    """

    def first(given: GroupedLinearCall) -> None:
        z, rows = given.out, given.n // (1 if call.gated else 2)  # given.n is of gate and up
        if call.gated:
            shape = z.shape[0], rows
            z = z.new_empty(shape) if space is None else space.view(z.dtype)[: z.shape[0] * rows].view(shape)
        product(given.replace(silu_mul=False, n=rows, out=z))
        activate(z, given.out)

    return first
