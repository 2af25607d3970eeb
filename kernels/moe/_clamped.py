"""The clamped activation of gpt-oss's experts (OpenAI, 2025, arXiv:2508.10925), in torch.

g = min(gate, limit), u = clamp(up, -limit, limit), h = g · sigmoid(alpha · g) · (u + 1)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

ALPHA, LIMIT = 1.702, 7.0
"""Of gpt-oss."""
INPUT_LIMIT = 1.5
"""What generated arguments clamp at: many of their gates and ups are larger, and most are not."""


def clamped(z: Tensor, alpha: float, limit: float) -> Tensor:
    """The activation of z [..., 2 N], gate first, in z's dtype -> [..., N]."""
    gate, up = z.chunk(2, -1)
    gate = gate.clamp(max=limit)
    return gate * (alpha * gate).sigmoid() * (up.clamp(-limit, limit) + 1)


def clamped_error(z: Tensor, size: Tensor, alpha: float, limit: float) -> Tensor:
    """The size of an error of the activation when gate and up, [..., 2 N] = z, have errors of `size`.

    |d/dg g · sigmoid(alpha · g)| is at most 1.1 for every alpha. Numbers beyond the limit count as if they were at it.
    """
    gate, up = z.chunk(2, -1)
    of_gate, of_up = size.chunk(2, -1)
    gate = gate.clamp(max=limit)
    act, factor = gate * (alpha * gate).sigmoid(), up.clamp(-limit, limit) + 1
    return 1.1 * of_gate * factor.abs() + of_up * act.abs() + 1e-3 * of_gate * of_up
