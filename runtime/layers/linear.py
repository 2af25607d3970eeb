"""Linear layers: a QuantTensor packed in the layouts of its plan, or several parts that cannot be one matrix."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple, Protocol, overload

import torch
from torch import Tensor

from gristmill.autotune.bound import BoundPlan
from gristmill.autotune.packing import pack_linear
from gristmill.kernels.common import dtype_name
from gristmill.quant import QuantTensor
from gristmill.quant.checkpoints.parts import Part
from gristmill.quant.checkpoints.weights import Weights
from gristmill.runtime.layers.codes import Codes
from gristmill.runtime.layers.plans import Plans


class Linear:
    """y = x · Wᵀ (+ bias); with silu_mul W holds gate and up, and y = silu(gate) · up.

    Args:
        weight: [N, K], dense or quantized; it is packed and may be dropped.
        dtype: the dtype of x; None = the model's.
        declared: the activation format of the checkpoint; `Plans.loaded` decides in which scheme the weight is loaded.
        target: the parameter's name in the model's table, if it has one.

    Attributes:
        takes: the format of `Codes` that it takes instead of floats; None = it takes floats alone.
    """

    def __init__(
        self,
        plans: Plans,
        weight: QuantTensor,
        bias: Tensor | None = None,
        *,
        silu_mul: bool = False,
        dtype: torch.dtype | None = None,
        declared: str | None = None,
        target: str = "",
    ) -> None:
        x = dtype_name(dtype or plans.dtype)
        weight = plans.loaded(weight, declared, x)
        epilogue = [name for name, on in (("bias", bias is not None), ("silu_mul", silu_mul)) if on]
        problem = plans.problem(
            "linear",
            n=weight.n,
            k=weight.k,
            x=x,
            w=str(weight.scheme),
            epilogue="+".join(epilogue) or "none",
            act_order=weight.g_idx is not None,
        )
        self.plans = plans
        self.weight = pack_linear(weight, problem, plans.resolver, target)
        self.plan = plans.bind_packed(problem, self.weight.layouts)
        self.takes = plans.takes_codes(problem)
        self._codes_plan: BoundPlan | None = None
        self.bias = bias
        self.silu_mul = silu_mul
        self.columns = weight.n // 2 if silu_mul else weight.n
        self.tensors = self.weight.tensors()
        plans.own(bias, *self.tensors)
        self.target = target

    def __call__(self, x: Tensor | Codes, out: Tensor | None = None) -> Tensor:
        """x [tokens, K] -> [tokens, N], or [tokens, N / 2] with silu_mul; in `out`, contiguous, if it is given."""
        plan, codes, scales = self.plan, None, None
        if isinstance(x, Codes):
            plan, (x, codes, scales) = self._codes_plan or self._bind_codes(), x
        rows = x.shape[0]
        out = x.new_empty(rows, self.columns) if out is None else out
        if rows:
            workspace = self.plans.workspace(plan, rows)
            plan(
                x,
                self.tensors,
                self.bias,
                None,
                self.silu_mul,
                self.weight.n,
                workspace,
                codes,
                scales,
                out,
            )
        return out

    def _bind_codes(self) -> BoundPlan:
        """The plan of calls with codes, from the first of them on: layers that nobody gives codes have none."""
        problem = self.plan.static.with_values(codes=True)
        self._codes_plan = self.plans.bind_packed(problem, self.weight.layouts, again=True)
        return self._codes_plan


class SplitLinear:
    """A fused matrix in parts, which are multiplied separately; x is first multiplied by the pre_scale of the part, if it has one.

    Checkpoints store the parts of q/k/v or gate/up in different schemes, or scale the input of a layer. It takes floats.
    """

    takes: str | None = None

    def __init__(
        self,
        plans: Plans,
        parts: list[Part],
        bias: Tensor | None = None,
        *,
        silu_mul: bool = False,
        target: str = "",
    ) -> None:
        rows = [part.weight.n for part in parts]
        biases = [None] * len(parts) if bias is None else [b.contiguous() for b in bias.split(rows)]
        self.target = target
        self.plans = plans
        self.scales = [part.pre_scale for part in parts]
        plans.own(*self.scales)
        gated = silu_mul and len(parts) == 1
        self.parts = [
            Linear(plans, p.weight, b, silu_mul=gated, declared=p.declared, target=target)
            for p, b in zip(parts, biases, strict=True)
        ]
        self.gating = None
        if silu_mul and not gated:
            self.gating = plans.bind("silu_and_mul", n=sum(rows) // 2, x=plans.x)
        self.columns = sum(part.columns for part in self.parts) // (2 if self.gating is not None else 1)

    def __call__(self, x: Tensor | Codes) -> Tensor:
        """x [tokens, K] -> [tokens, N], or [tokens, N / 2] with silu_mul."""
        if isinstance(x, Codes):
            raise TypeError(f"{self.target} takes floats, got codes")
        outputs = [
            part(x if scale is None else x * scale)
            for part, scale in zip(self.parts, self.scales, strict=True)
        ]
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
        if self.gating is None or not x.shape[0]:
            return joined[:, : self.columns]
        out = x.new_empty(x.shape[0], self.columns)
        self.gating(joined, out)
        return out


class PartialSum(NamedTuple):
    """The result of a row-parallel layer before the sum over the ranks, which the caller completes: `RMSNorm.add`, for example.

    Attributes:
        x: [tokens, hidden], contiguous, of this rank.
    """

    x: Tensor


class AllReduce:
    """The sum over all ranks of x [tokens, columns], in place."""

    def __init__(self, plans: Plans, columns: int) -> None:
        self.mesh = plans.mesh
        self.plan = plans.bind("all_reduce", n=columns, x=plans.x, world=self.mesh.world)

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, columns], contiguous, which is returned."""
        self.plan(x, self.mesh.group, self.mesh.world)
        return x


class RowParallelLinear:
    """A linear layer whose input dimension is sharded over the ranks (Megatron-LM's row parallelism).

    Args:
        local: the layer over the columns of this rank, without a bias.
        bias: added after the sum; it takes `reduce`.
        reduce: whether a call sums over the ranks; if not, it returns a `PartialSum`.
    """

    def __init__(
        self, plans: Plans, local: Linear | SplitLinear, bias: Tensor | None = None, *, reduce: bool = True
    ) -> None:
        self.local, self.bias, self.target = local, bias, local.target
        self.takes, self.columns = local.takes, local.columns
        self.all_reduce = AllReduce(plans, local.columns) if reduce else None
        plans.own(bias)

    def __call__(self, x: Tensor | Codes) -> Tensor | PartialSum:
        """x [tokens, K of this rank] -> [tokens, N]."""
        y = self.local(x)
        if self.all_reduce is None:
            return PartialSum(y)
        y = self.all_reduce(y)
        return y if self.bias is None else y.add_(self.bias)


class PartialProduct(Protocol):
    """A linear layer whose sum over the ranks may be left to the caller. `takes` is as of `Linear`; columns: of its result."""

    takes: str | None
    columns: int

    def __call__(self, x: Tensor | Codes, /) -> Tensor | PartialSum:
        """x [tokens, K] -> [tokens, columns]."""
        ...


class Product(PartialProduct, Protocol):
    """A linear layer whose result is complete."""

    def __call__(self, x: Tensor | Codes, /) -> Tensor:
        """x [tokens, K] -> [tokens, columns]."""
        ...


@overload
def load_linear(
    plans: Plans, weights: Weights, target: str, *, silu_mul: bool = ..., reduce: Literal[True] = ...
) -> Product: ...


@overload
def load_linear(
    plans: Plans, weights: Weights, target: str, *, silu_mul: bool = ..., reduce: bool
) -> PartialProduct: ...


def load_linear(
    plans: Plans, weights: Weights, target: str, *, silu_mul: bool = False, reduce: bool = True
) -> PartialProduct:
    """The linear layer of a parameter, with a bias if the table has ``TARGET.bias``.

    Args:
        target: the parameter's name in the model's table.
        silu_mul: the weight holds gate and up; the result is silu(gate) * up.
        reduce: False lets a row-parallel layer without a bias return a `PartialSum`.
    """
    parts, bias = _loaded(plans, weights.parts(target)), weights.optional(f"{target}.bias")
    if not weights.is_partial(target):
        return _linear(plans, parts, bias, target, silu_mul)
    local = _linear(plans, parts, None, target, silu_mul)
    return RowParallelLinear(plans, local, bias, reduce=reduce or bias is not None)


def _loaded(plans: Plans, parts: list[Part]) -> list[Part]:
    """The parts of a weight as they are loaded: one part if all become dense."""
    made = [replace(part, weight=plans.loaded(part.weight, part.declared), declared=None) for part in parts]
    if len(made) > 1 and all(part.weight.scheme.is_dense and part.pre_scale is None for part in made):
        return [Part(QuantTensor.from_dense(torch.cat([part.weight.dense() for part in made])))]
    return made


def _linear(
    plans: Plans, parts: list[Part], bias: Tensor | None, target: str, silu_mul: bool
) -> Linear | SplitLinear:
    if len(parts) > 1 or parts[0].pre_scale is not None:
        return SplitLinear(plans, parts, bias, silu_mul=silu_mul, target=target)
    (part,) = parts
    return Linear(plans, part.weight, bias, silu_mul=silu_mul, declared=part.declared, target=target)
