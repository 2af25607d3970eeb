"""What follows the product, in torch: float32 inside, rounded once into the output."""

from __future__ import annotations

import torch
from torch import Tensor


def finish(z: Tensor, bias: Tensor | None, residual: Tensor | None, silu_mul: bool, out: Tensor) -> None:
    """z [..., N] (+ bias), silu(gate) * up, (+ residual) -> out."""
    if z.dtype != torch.float32 and (bias is not None or residual is not None or silu_mul):
        z = z.float()
    if bias is not None:
        z = z + bias.float()
    if silu_mul:
        gate, up = z.chunk(2, -1)
        z = torch.nn.functional.silu(gate) * up
    if residual is not None:
        z = z + residual.float()
    out.copy_(z)
