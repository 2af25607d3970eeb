"""A linear layer of a host, to be timed beside our product of the same size and scheme."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from gristmill.integrations.measured import Call, Case, Inputs, with_copies
from gristmill.integrations.product import Product
from gristmill.kernels.linear.weight import problem_of
from gristmill.quant import quantize


@dataclass(frozen=True)
class LinearCase(Case):
    """y = W · x, with W [n, k] in a scheme. `Inputs` are x [T, K]."""

    op: ClassVar[str] = "linear"
    scheme: str
    n: int
    k: int
    dtype: torch.dtype

    def problem(self) -> str:
        """The problem of a product without a bias."""
        return problem_of(self.scheme, self.n, self.k, self.dtype)

    def weights(self) -> int:
        """Those of the matrix."""
        return self.n * self.k

    def ours(self, device: torch.device, copies: int) -> list[Call]:
        """Of random weights."""
        generator = torch.Generator(device).manual_seed(0)
        dense = torch.randn(self.n, self.k, generator=generator, device=device, dtype=torch.float32)
        first = Product(quantize(dense, self.scheme), None, self.dtype, device)
        return [product.without_bias for product in with_copies(first, copies, "tensors")]

    def inputs(self, size: int, device: torch.device) -> list[Inputs]:
        """One x."""
        generator = torch.Generator(device).manual_seed(0)
        x = torch.randn(size, self.k, generator=generator, device=device, dtype=torch.float32)
        return [(x.to(self.dtype),)]
