"""The gated feed-forward block of Llama and its descendants: down(silu(gate(x)) · up(x))."""

from __future__ import annotations

from torch import Tensor

from gristmill.runtime.layers.linear import Linear
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.loader.weights import Weights


class MLP:
    """Gate and up as one product, their gating in its epilogue, and down."""

    def __init__(self, plans: Plans, weights: Weights, name: str) -> None:
        self.gate_up = Linear(
            plans, weights.linear(f"{name}.gate_up"), weights.optional(f"{name}.gate_up.bias"), silu_mul=True
        )
        self.down = Linear(plans, weights.linear(f"{name}.down"), weights.optional(f"{name}.down.bias"))

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        return self.down(self.gate_up(x))
