"""The gated feed-forward block of Llama and its descendants: down(silu(gate(x)) · up(x))."""

from __future__ import annotations

from torch import Tensor

from gristmill.quant.checkpoints.weights import Weights
from gristmill.runtime.layers.linear import PartialSum, load_linear
from gristmill.runtime.layers.plans import Plans


class MLP:
    """Fused gate/up projection with the activation in its epilogue, and the down projection. `reduce` is as in `load_linear`."""

    def __init__(self, plans: Plans, weights: Weights, name: str, *, reduce: bool = True) -> None:
        self.gate_up = load_linear(plans, weights, f"{name}.gate_up", silu_mul=True)
        self.down = load_linear(plans, weights, f"{name}.down", reduce=reduce)

    def __call__(self, x: Tensor) -> Tensor | PartialSum:
        """x [tokens, hidden] -> [tokens, hidden]."""
        return self.down(self.gate_up(x))
