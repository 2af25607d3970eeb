"""Routed experts of a host, to be timed beside ours of the same sizes and scheme."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from gristmill.autotune.timing import GPU_CALLS
from gristmill.integrations.experts import Experts, problem_of
from gristmill.integrations.measured import Call, Case, Inputs, with_copies
from gristmill.quant import QuantTensor, quantize

ROUTINGS = GPU_CALLS
"""Choices of experts that calls rotate over: a few tokens read a few experts, which the cache would hold in the next call."""


@dataclass(frozen=True)
class ExpertsCase(Case):
    """The gated experts of each token, weighed and summed. `Inputs` are x [T, H], weights float32 and ids int32 [T, top_k]."""

    op: ClassVar[str] = "moe"
    scheme: str
    experts: int
    top_k: int
    hidden: int
    inner: int
    dtype: torch.dtype

    def problem(self) -> str:
        """The problem of these sizes."""
        return problem_of(self.scheme, self.experts, self.top_k, self.hidden, self.inner, self.dtype)

    def weights(self) -> int:
        """Those of gate, up and down of all experts."""
        return 3 * self.experts * self.hidden * self.inner

    def ours(self, device: torch.device, copies: int) -> list[Call]:
        """Of random weights, the same for each expert, in memory of its own."""
        generator = torch.Generator(device).manual_seed(0)

        def repeated(n: int, k: int) -> list[QuantTensor]:
            dense = torch.randn(n, k, generator=generator, device=device, dtype=torch.float32) / k**0.5
            return [quantize(dense, self.scheme)] * self.experts

        w13, w2 = repeated(2 * self.inner, self.hidden), repeated(self.hidden, self.inner)
        first = Experts(w13, w2, self.top_k, self.dtype, device)
        return [*with_copies(first, copies, "w13", "w2")]

    def inputs(self, size: int, device: torch.device) -> list[Inputs]:
        """One x, and many choices of experts: distinct for a token, each as probable as the others, weights that sum to 1."""
        generator = torch.Generator(device).manual_seed(0)

        def uniform(columns: int) -> torch.Tensor:
            return torch.rand(size, columns, generator=generator, device=device, dtype=torch.float32)

        x = torch.randn(size, self.hidden, generator=generator, device=device, dtype=torch.float32).to(
            self.dtype
        )
        chosen: list[Inputs] = []
        for _ in range(ROUTINGS):
            ids = uniform(self.experts).topk(self.top_k).indices.to(torch.int32)
            weights = uniform(self.top_k) + 0.1
            chosen.append((x, weights / weights.sum(-1, keepdim=True), ids))
        return chosen
