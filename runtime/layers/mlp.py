"""The gated feed-forward block of Llama and its descendants: down(silu(gate(x)) · up(x)), or with gelu in the place of silu."""

from __future__ import annotations

from torch import Tensor

from gristmill.autotune.bound import BoundPlan
from gristmill.quant.checkpoints.weights import Weights
from gristmill.runtime.layers.codes import Codes, dtype_of, new_codes
from gristmill.runtime.layers.linear import PartialSum, load_linear
from gristmill.runtime.layers.plans import Plans


class MLP:
    """Fused gate/up projection and the down projection. `reduce` is as in `load_linear`.

    silu is in the epilogue of the first product, or in a call of its own that makes the codes which the second one takes; gelu in a call of
    its own.

    Args:
        activation: ``silu``, ``gelu``, or ``gelu_tanh``, gelu by the formula with tanh.

    Attributes:
        takes: the format of codes that it takes instead of floats; None = floats alone.
    """

    def __init__(
        self, plans: Plans, weights: Weights, name: str, *, reduce: bool = True, activation: str = "silu"
    ) -> None:
        self.down = load_linear(plans, weights, f"{name}.down", reduce=reduce)
        is_silu = activation == "silu"
        self.form = self.down.takes if plans.gates_apart and is_silu else None
        self.gate_up = load_linear(plans, weights, f"{name}.gate_up", silu_mul=self.form is None and is_silu)
        self.takes = self.gate_up.takes
        self.gating: BoundPlan | None = None
        self.gelu: BoundPlan | None = None
        if not is_silu:
            n = self.gate_up.columns // 2
            self.approximate = "tanh" if activation == "gelu_tanh" else "none"
            self.gelu = plans.bind("gelu_and_mul", n=n, x=plans.x, approximate=self.approximate)
        if self.form is not None:
            columns, q = self.gate_up.columns // 2, dtype_of(self.form)
            self.gating = plans.bind("silu_and_mul_quant", n=columns, x=plans.x, q=q, format=self.form)

    def __call__(self, x: Tensor | Codes) -> Tensor | PartialSum:
        """x [tokens, hidden] -> [tokens, hidden]."""
        inner = self.gate_up(x)
        if self.gelu is not None:
            gated = inner.new_empty(inner.shape[0], inner.shape[1] // 2)
            self.gelu(inner, self.approximate, gated)
            return self.down(gated)
        if self.gating is None or self.form is None:
            return self.down(inner)
        columns = inner.shape[1] // 2
        codes, scales = new_codes(inner, columns, self.form)
        if inner.shape[0]:
            self.gating(inner, codes, scales, self.form)
        return self.down(Codes(inner[:, :columns], codes, scales))
