"""Linear layers: a QuantTensor packed in the layouts of its plan, or several parts that cannot be one matrix."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from gristmill.autotune.packing import pack_linear
from gristmill.kernels.common import dtype_name
from gristmill.quant import QuantTensor
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.loader.weights import Part, Weights


class Linear:
    """y = x · Wᵀ (+ bias); with silu_mul W holds gate and up, and y = silu(gate) · up.

    weight: [N, K], dense or quantized; it is packed and may be dropped. dtype: of x, None for the model's. declared: the activation
    format of the checkpoint; `Plans.loaded` says in which scheme the weight is loaded. `target` is the parameter's name in the
    model's table, if it has one.
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
        self.bias = bias
        self.silu_mul = silu_mul
        self.columns = weight.n // 2 if silu_mul else weight.n
        self.tensors = self.weight.tensors()
        plans.own(bias, *self.tensors)
        self.target = target

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, K] -> [tokens, N], or [tokens, N / 2] with silu_mul."""
        rows = x.shape[0]
        out = x.new_empty(rows, self.columns)
        if rows:
            scratch = self.plans.scratch(self.plan, rows)
            self.plan(x, self.tensors, self.bias, None, self.silu_mul, self.weight.n, scratch, out)
        return out


class SplitLinear:
    """A fused matrix in parts, which are multiplied separately; x is first multiplied by the pre_scale of the part, if it has one.

    Checkpoints store the parts of q/k/v or gate/up in different schemes, or scale the input of a layer.
    """

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

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, K] -> [tokens, N], or [tokens, N / 2] with silu_mul."""
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


class Summand(NamedTuple):
    """What a layer returns if it leaves its sum over the ranks to the caller: to the norm after it (`RMSNorm.add`), for example.

    x: [tokens, hidden], contiguous, of this rank.
    """

    x: Tensor


class SumOfRanks:
    """x of every rank becomes the sum over all ranks, in place. columns: of x."""

    def __init__(self, plans: Plans, columns: int) -> None:
        self.mesh = plans.mesh
        self.plan = plans.bind("all_reduce", n=columns, x=plans.x, world=self.mesh.world)

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, columns], contiguous; returned."""
        self.plan(x, self.mesh.group, self.mesh.world)
        return x


class SummandLinear:
    """A linear layer whose columns the ranks share, without a bias: the product of this rank."""

    def __init__(self, part: Linear | SplitLinear) -> None:
        self.part, self.target = part, part.target

    def __call__(self, x: Tensor) -> Summand:
        """x [tokens, K of this rank] -> [tokens, N]."""
        return Summand(self.part(x))


class SummedLinear:
    """A linear layer whose columns the ranks share: the sum of their products, and then the bias."""

    def __init__(self, plans: Plans, part: Linear | SplitLinear, bias: Tensor | None) -> None:
        self.part, self.bias, self.target = part, bias, part.target
        self.sum = SumOfRanks(plans, part.columns)
        plans.own(bias)

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, K of this rank] -> [tokens, N]."""
        y = self.sum(self.part(x))
        return y if self.bias is None else y.add_(self.bias)


@overload
def load_linear(
    plans: Plans, weights: Weights, target: str, *, silu_mul: bool = ..., summed: Literal[True] = ...
) -> Linear | SplitLinear | SummedLinear: ...


@overload
def load_linear(
    plans: Plans, weights: Weights, target: str, *, silu_mul: bool = ..., summed: bool
) -> Linear | SplitLinear | SummedLinear | SummandLinear: ...


def load_linear(
    plans: Plans, weights: Weights, target: str, *, silu_mul: bool = False, summed: bool = True
) -> Linear | SplitLinear | SummedLinear | SummandLinear:
    """The linear layer of a parameter, with a bias if the table has ``TARGET.bias``.

    summed: False leaves the sum over the ranks, if they share its columns, to the caller, who gets a `Summand`. A bias is added after
    the sum: a layer that has one sums by itself.
    """
    parts, bias = _loaded(plans, weights.parts(target)), weights.optional(f"{target}.bias")
    if not weights.is_partial(target):
        return _linear(plans, parts, bias, target, silu_mul)
    part = _linear(plans, parts, None, target, silu_mul)
    return SummedLinear(plans, part, bias) if summed or bias is not None else SummandLinear(part)


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
