"""Linear layers: a QuantTensor packed for the layouts of its plan."""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill.kernels.common import dtype_name
from gristmill.kernels.linear.weight import LinearWeight, problem_of
from gristmill.quant import QuantTensor
from gristmill.runtime.layers.plans import Plans


class Linear:
    """y = x · Wᵀ (+ bias); with silu_mul W holds gate and up, and y = silu(gate) · up.

    weight: [N, K], dense or quantized; it is packed and may be dropped. dtype: of x, None for the model's.
    """

    def __init__(
        self,
        plans: Plans,
        weight: QuantTensor,
        bias: Tensor | None = None,
        *,
        silu_mul: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        x = dtype_name(dtype or plans.dtype)
        act_order = weight.g_idx is not None
        problem = problem_of(weight.scheme, weight.n, weight.k, x, bias is not None, False, silu_mul, act_order)
        layouts = plans.layouts("linear", problem)
        self.plans = plans
        self.plan = plans.bind("linear", problem, layouts)
        self.weight = LinearWeight.pack(weight, sorted(layouts))
        self.bias = bias
        self.silu_mul = silu_mul
        self.columns = weight.n // 2 if silu_mul else weight.n
        plans.own(bias, *(tensor for packing in self.weight.packed.values() for tensor in packing))
        self._only = self.weight.tensors() if len(layouts) == 1 else None

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, K] -> [tokens, N], or [tokens, N / 2] with silu_mul."""
        rows = x.shape[0]
        out = x.new_empty(rows, self.columns)
        if rows:
            tensors = self._only or self.weight.tensors(self.plan.entry(rows).layout)
            scratch = self.plans.scratch(self.plan, rows)
            self.plan(x, tensors, self.bias, None, self.silu_mul, self.weight.n, scratch, out)
        return out
