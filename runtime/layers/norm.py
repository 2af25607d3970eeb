"""RMSNorm, alone or with the residual added first."""

from __future__ import annotations

from torch import Tensor

from gristmill.runtime.layers.linear import PartialSum
from gristmill.runtime.layers.plans import Plans


class RMSNorm:
    """RMSNorm over the last dimension, with `weight` [N] in the model's dtype."""

    def __init__(self, plans: Plans, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        plans.own(weight)
        self.plan = plans.bind("rms_norm", n=weight.shape[0], x=plans.x)
        self.add_plan = plans.bind("fused_add_rms_norm", n=weight.shape[0], x=plans.x)
        self.mesh = plans.mesh
        self.sum_plan = None
        if self.mesh.world > 1:
            self.sum_plan = plans.bind(
                "all_reduce_add_rms_norm", n=weight.shape[0], x=plans.x, world=self.mesh.world
            )

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, N] -> [tokens, N]."""
        out = x.new_empty(x.shape)
        self.plan(x, self.weight, self.eps, out)
        return out

    def add(self, x: Tensor | PartialSum, residual: Tensor) -> Tensor:
        """residual += x in place, the sum of all ranks' x if it is a `PartialSum`; returns the norm of the residual, which overwrites x."""
        if isinstance(x, PartialSum):
            if self.sum_plan is None:
                raise ValueError("a partial sum over ranks in a model of one rank")
            part, mesh = x.x, self.mesh
            self.sum_plan(part, residual, self.weight, self.eps, mesh.group, mesh.world, part)
            return part
        self.add_plan(x, residual, self.weight, self.eps, x)
        return x
