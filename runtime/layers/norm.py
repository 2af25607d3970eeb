"""RMSNorm and LayerNorm, alone or with the residual added first; as floats, or as the codes that the next layer takes."""

from __future__ import annotations

from torch import Tensor

from gristmill.autotune.bound import BoundPlan
from gristmill.kernels.common import dtype_name
from gristmill.quant.checkpoints.weights import Weights
from gristmill.runtime.config import ModelConfig
from gristmill.runtime.layers.codes import Codes, dtype_of, new_codes
from gristmill.runtime.layers.linear import AllReduce, PartialSum
from gristmill.runtime.layers.plans import Plans


class NoNorm:
    """In the place of the norm before a block that takes the residual itself."""

    def serve(self, takes: str | None, keep: bool = False) -> None:
        """As of `RMSNorm`: the residual is never codes."""

    def add_for(self, x: Tensor | PartialSum, residual: Tensor) -> Tensor:
        """residual += x in place, which is returned; the next layer must not write it."""
        if isinstance(x, PartialSum):
            raise ValueError("a partial sum over ranks, and no norm to complete it")
        return residual.add_(x)


class RMSNorm:
    """RMSNorm over the last dimension.

    Args:
        weight: [N] in the model's dtype, or float32.
    """

    def __init__(self, plans: Plans, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        self.plans = plans
        self.codes_plan: BoundPlan | None = None
        self.form, self.keeps = "", False
        plans.own(weight)
        n, w = weight.shape[0], weight_axis(weight, plans)
        self.is_wide = w == "fp32"
        self.plan = plans.bind("rms_norm", n=n, x=plans.x, w=w)
        self.add_plan = plans.bind("fused_add_rms_norm", n=n, x=plans.x, w=w)
        self.mesh = plans.mesh
        self.sum_plan = self.all_reduce = None
        if self.mesh.world > 1 and self.is_wide:
            self.all_reduce = AllReduce(plans, n)
        elif self.mesh.world > 1:
            self.sum_plan = plans.bind("all_reduce_add_rms_norm", n=n, x=plans.x, world=self.mesh.world)

    def serve(self, takes: str | None, keep: bool = False) -> None:
        """From now on `add_for` returns codes in the format that the next layer takes; None = floats. keep: the norm itself is their x."""
        if takes is not None and not self.is_wide:
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
        """residual += x in place, the sum of all ranks' x if it is a `PartialSum`; returns the norm of the residual, which may overwrite x."""
        if isinstance(x, PartialSum) and self.sum_plan is not None:
            part, mesh = x.x, self.mesh
            self.sum_plan(part, residual, self.weight, self.eps, mesh.group, mesh.world, part)
            return part
        x = _complete(x, self.all_reduce)
        self.add_plan(x, residual, self.weight, self.eps, x)
        return x


class LayerNorm:
    """LayerNorm over the last dimension. `weight` and `bias`, None = without one, [N] in the model's dtype."""

    def __init__(self, plans: Plans, weight: Tensor, eps: float, bias: Tensor | None = None) -> None:
        self.weight, self.eps, self.bias = weight, eps, bias
        plans.own(weight, bias)
        n = weight.shape[0]
        self.plan = plans.bind("layer_norm", n=n, x=plans.x, bias=bias is not None)
        self.add_plan = plans.bind("layer_norm", n=n, x=plans.x, bias=bias is not None, residual=True)
        self.all_reduce = AllReduce(plans, n) if plans.mesh.world > 1 else None

    def serve(self, takes: str | None, keep: bool = False) -> None:
        """As of `RMSNorm`; the result is always floats."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, N] -> [tokens, N]."""
        out = x.new_empty(x.shape)
        self.plan(x, self.weight, self.bias, self.eps, None, out)
        return out

    def add_for(self, x: Tensor | PartialSum, residual: Tensor) -> Tensor:
        """As `add`."""
        return self.add(x, residual)

    def add(self, x: Tensor | PartialSum, residual: Tensor) -> Tensor:
        """residual += x in place, the sum of all ranks' x if it is a `PartialSum`; returns the norm of the residual, which overwrites x."""
        x = _complete(x, self.all_reduce)
        self.add_plan(x, self.weight, self.bias, self.eps, residual, x)
        return x


def weight_axis(weight: Tensor, plans: Plans) -> str:
    """The axis w of a norm with a weight in the model's dtype or float32."""
    return "x" if weight.dtype == plans.dtype else dtype_name(weight.dtype)


def _complete(x: Tensor | PartialSum, all_reduce: AllReduce | None) -> Tensor:
    """x [tokens, N], summed over the ranks if it is a `PartialSum`."""
    if not isinstance(x, PartialSum):
        return x
    if all_reduce is None:
        raise ValueError("a partial sum over ranks in a model of one rank")
    return all_reduce(x.x)


def load_norm(plans: Plans, weights: Weights, target: str, c: ModelConfig) -> RMSNorm | LayerNorm:
    """The norm of a parameter, of the kind that the model has."""
    if c.norm == "layer":
        return LayerNorm(plans, weights.tensor(target), c.rms_eps, weights.optional(f"{target}.bias"))
    return RMSNorm(plans, norm_weight(weights, target, c), c.rms_eps)


def norm_weight(weights: Weights, target: str, c: ModelConfig) -> Tensor:
    """The weight of a norm, with `c.norm_offset` added, in float32 if `c.wide_norms`."""
    weight = weights.tensor(target)
    return weight + c.norm_offset if c.norm_offset else weight
