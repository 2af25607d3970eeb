"""What follows the product: float32 inside, rounded once into the output."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

GATING = {"block": 1024, "warps": 4}
"""The configuration of `silu_and_mul_triton` for rows of 1024 and more elements."""


def finish(z: Tensor, bias: Tensor | None, residual: Tensor | None, silu_mul: bool, out: Tensor) -> None:
    """z [..., N] (+ bias), silu(gate) * up, (+ residual) -> out. On a GPU gating alone is one launch, where torch has four."""
    if silu_mul and bias is None and residual is None and z.is_cuda and _has_triton():
        from gristmill.kernels.activation.silu_and_mul import OP
        from gristmill.kernels.activation.silu_and_mul_triton import launch

        launch(GATING, OP.Call(z, out))
    else:
        finish_in_torch(z, bias, residual, silu_mul, out)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def finish_in_torch(
    z: Tensor, bias: Tensor | None, residual: Tensor | None, silu_mul: bool, out: Tensor
) -> None:
    """The same in torch alone."""
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
