"""Routed experts of a host's model: their weights packed, and the plan that computes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gristmill import ops
from gristmill.autotune.operators import writer
from gristmill.integrations.layouts import choose_layout
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.common import dtype_name
from gristmill.quant import QuantTensor, pack, stack
from gristmill.quant.formats.contract import owned

MOE = writer(default_registry().op("moe"), "x", "weights", "ids", "w13", "w2", "inter")


def problem_of(scheme: str, experts: int, top_k: int, hidden: int, inner: int, dtype: torch.dtype) -> str:
    """The static problem of gated experts with silu."""
    return f"top_k={top_k},e={experts},h={hidden},i={inner},x={dtype_name(dtype)},w={scheme}"


class Experts:
    """The packed weights of a layer's experts, and their plan.

    Args:
        w13: gate and up of each expert, [2 I, H], gate rows first.
        w2: down of each expert, [H, I].
    """

    def __init__(
        self,
        w13: Sequence[QuantTensor],
        w2: Sequence[QuantTensor],
        top_k: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        hidden, self.inner = w2[0].shape
        self.scheme = str(w2[0].scheme)
        problem = problem_of(self.scheme, len(w2), top_k, hidden, self.inner, dtype)
        layout = choose_layout("moe", problem, device)
        self.w13 = pack(owned(stack(w13)), layout).tensors
        self.w2 = pack(owned(stack(w2)), layout).tensors
        self.plan = ops.bind("moe", problem, device, layouts=frozenset({layout}))
        self.handle = self.plan.handle

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """x [T, H], weights float32 and ids int32 [T, K] -> [T, H]."""
        out = torch.empty_like(x)
        MOE(x, weights, ids, self.w13, self.w2, self.inner, self.handle, out)
        return out

    def prepare(self, sizes: Sequence[int]) -> None:
        """Resolve, verify and load the kernels for these numbers of tokens."""
        self.plan.prepare(sizes)

    def kernels(self) -> str:
        """The kernels of small and large batches."""
        return ", ".join(dict.fromkeys(self.plan.entry(size).kernel for size in (1, 16, 256)))
