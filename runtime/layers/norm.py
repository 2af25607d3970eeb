"""RMSNorm, alone or with the residual added first."""

from __future__ import annotations

from torch import Tensor

from gristmill.runtime.layers.plans import Plans


class RMSNorm:
    """RMSNorm over the last dimension. weight: [N] in the model's dtype."""

    def __init__(self, plans: Plans, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        plans.own(weight)
        self.plan = plans.bind("rms_norm", n=weight.shape[0], x=plans.x)
        self.add_plan = plans.bind("fused_add_rms_norm", n=weight.shape[0], x=plans.x)

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, N] -> [tokens, N]."""
        out = x.new_empty(x.shape)
        self.plan(x, self.weight, self.eps, out)
        return out

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual += x in place; returns the norm of the sum, which overwrites x."""
        self.add_plan(x, residual, self.weight, self.eps, x)
        return x
