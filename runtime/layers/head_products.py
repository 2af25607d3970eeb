"""A product per head: rows of each head times the head's own matrix.

torch.bmm, whose order of additions may depend on the number of rows; under a batch-invariant policy `grouped_linear`, with heads as
experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill.autotune.packing import plan_layouts
from gristmill.quant import QuantTensor, pack
from gristmill.runtime.layers.plans import Plans

NO_EPILOGUE = (None, False, 0.0, 0.0)
"""No bias, no clamped activation."""


class HeadProducts:
    """[tokens, heads, k] times [heads, k, n] -> [tokens, heads, n]."""

    def __init__(self, plans: Plans, weight: Tensor) -> None:
        self.heads, self.k, self.n = weight.shape
        self.plan = None
        if plans.policy.batch_invariant:
            problem = plans.problem(
                "grouped_linear",
                e=self.heads,
                n=self.n,
                k=self.k,
                x=plans.x,
                w=plans.x,
                epilogue="none",
                gather=0,
            )
            layout = min(plan_layouts(plans.resolver, problem))
            self.plan = plans.bind_packed(problem, frozenset((layout,)))
            self.weight = pack(QuantTensor.from_dense(weight.transpose(1, 2).contiguous()), layout).tensors
        else:
            self.weight = [weight.contiguous()]
        plans.own(*self.weight)

    def __call__(self, x: Tensor) -> Tensor:
        """x: of any strides. The result is a view of heads by tokens."""
        rows = x.transpose(0, 1)
        if self.plan is None:
            return torch.bmm(rows, self.weight[0]).transpose(0, 1)
        tokens = x.shape[0]
        ends = torch.arange(0, self.heads * tokens + 1, max(tokens, 1), dtype=torch.int32, device=x.device)
        out = x.new_empty(self.heads * tokens, self.n)
        self.plan(
            rows.contiguous().view(self.heads * tokens, self.k),
            self.weight,
            ends,
            None,
            1,
            False,
            self.n,
            *NO_EPILOGUE,
            out,
        )
        return out.view(self.heads, tokens, self.n).transpose(0, 1)

    def of_all(self, x: Tensor, heads: slice, *, out: Tensor, transposed: bool = False) -> None:
        """x [rows, k] times the matrices of some heads, into out [rows, heads, n] of any strides. transposed: x [rows, n], out [rows, heads, k].

        Not under a batch-invariant policy, which packs the matrices.
        """
        weight = self.weight[0][heads]
        some = weight.transpose(1, 2) if transposed else weight
        torch.bmm(x.expand(len(some), *x.shape), some, out=out.transpose(0, 1))
