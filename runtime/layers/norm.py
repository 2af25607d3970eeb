"""RMSNorm, alone or with the residual added first; as floats, or as the codes that the next layer takes."""

from __future__ import annotations

from torch import Tensor

from gristmill.autotune.bound import BoundPlan
from gristmill.runtime.layers.codes import Codes, dtype_of, new_codes
from gristmill.runtime.layers.linear import PartialSum
from gristmill.runtime.layers.plans import Plans


class RMSNorm:
    """RMSNorm over the last dimension, with `weight` [N] in the model's dtype."""

    def __init__(self, plans: Plans, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        self.plans = plans
        self.codes_plan: BoundPlan | None = None
        self.form, self.keeps = "", False
        plans.own(weight)
        self.plan = plans.bind("rms_norm", n=weight.shape[0], x=plans.x)
        self.add_plan = plans.bind("fused_add_rms_norm", n=weight.shape[0], x=plans.x)
        self.mesh = plans.mesh
        self.sum_plan = None
        if self.mesh.world > 1:
            self.sum_plan = plans.bind(
                "all_reduce_add_rms_norm", n=weight.shape[0], x=plans.x, world=self.mesh.world
            )

    def serve(self, takes: str | None, keep: bool = False) -> None:
        """From now on `add_for` returns codes in the format that the next layer takes; None = floats. keep: the norm itself is their x."""
        if takes is not None:
            self.form, self.keeps = takes, keep
            self.codes_plan = self.plans.bind(
                "rms_norm_quant",
                n=self.weight.shape[0],
                x=self.plans.x,
                q=dtype_of(takes),
                format=takes,
                residual=True,
                normed=keep,
            )

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, N] -> [tokens, N]."""
        out = x.new_empty(x.shape)
        self.plan(x, self.weight, self.eps, out)
        return out

    def add_for(self, x: Tensor | PartialSum, residual: Tensor) -> Tensor | Codes:
        """As `add`, in the form that the next layer takes. After a sum over ranks it is floats."""
        if isinstance(x, PartialSum) or self.codes_plan is None or not x.shape[0]:
            return self.add(x, residual)
        codes, scales = new_codes(x, x.shape[1], self.form)
        normed = x if self.keeps else None
        self.codes_plan(x, residual, self.weight, self.eps, codes, scales, self.form, normed)
        return Codes(x, codes, scales)

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
