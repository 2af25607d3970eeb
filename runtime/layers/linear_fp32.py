"""A linear layer with a result in float32, of a router or a gate."""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill.kernels.common import dtype_name
from gristmill.quant import QuantTensor
from gristmill.runtime.layers.linear import Linear
from gristmill.runtime.layers.plans import Plans


def takes_16_bits(plans: Plans) -> bool:
    """Whether x is multiplied as it is. Recorded steps of a CPU consist of native kernels, of which `linear` has one for float32."""
    return plans.device.type != "cpu" and plans.dtype != torch.float32


class LinearFp32:
    """y = x · Wᵀ (+ bias) in float32, of x in the model's dtype.

    On accelerators it is one launch over x as it is: a weight that the model's dtype holds exactly, as every weight that was stored in it, is
    multiplied in it. On a CPU, and where x has 32 bits, `linear` multiplies float32 by float32.

    Args:
        weight: float32 [N, K].
        bias: float32 [N].
    """

    def __init__(self, plans: Plans, weight: Tensor, bias: Tensor | None = None) -> None:
        self.plans, self.bias = plans, bias
        self.linear: Linear | None = None
        if not takes_16_bits(plans):
            self.linear = Linear(plans, QuantTensor.from_dense(weight), bias, dtype=torch.float32)
            return
        narrow = weight.to(plans.dtype)
        self.weight = narrow if torch.equal(narrow.float(), weight) else weight
        self.plan = plans.bind(
            "linear_fp32",
            n=weight.shape[0],
            k=weight.shape[1],
            x=plans.x,
            w="x" if self.weight.dtype == plans.dtype else dtype_name(self.weight.dtype),
            bias=bias is not None,
        )
        plans.own(self.weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, K] -> float32 [tokens, N]."""
        if self.linear is not None:
            return self.linear(x.float())
        rows = x.shape[0]
        out = x.new_empty(rows, self.weight.shape[0], dtype=torch.float32)
        if rows:
            self.plan(x, self.weight, self.bias, self.plans.workspace(self.plan, rows), out)
        return out
