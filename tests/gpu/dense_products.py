"""What the tests of dense products on Hopper share: inputs, the reference, a call into a guarded buffer, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.calls import make_call

DEVICE = "cuda:0"
LIMIT = {torch.bfloat16: 5e-3, torch.float16: 6e-4}
SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, device=DEVICE, generator=generator).to(dtype)


def run(
    launch: Callable[[dict[str, int], Any], None],
    x: torch.Tensor,
    w: torch.Tensor,
    config: dict[str, int],
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """Calls a kernel by its launcher once, into the middle of a poisoned buffer, and checks that the rows around it stay untouched."""
    m, n = x.shape[0], w.shape[0]
    buffer = torch.full((m + 2, n // 2 if gated else n), float("nan"), dtype=x.dtype, device=DEVICE)
    launch(config, make_call("linear", x, [w], bias, residual, gated, n, None, buffer[1 : m + 1]))
    assert bool(buffer[0].isnan().all()) and bool(buffer[m + 1].isnan().all())
    return buffer[1 : m + 1]


def expected(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    z = x.double() @ w.double().T
    z = z if bias is None else z + bias.double()
    if gated:
        gate, up = z.chunk(2, -1)
        z = torch.nn.functional.silu(gate) * up
    return z if residual is None else z + residual.double()


def worst(y: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest error over the average size of a result."""
    return float(((y.double() - reference).abs().max() / reference.square().mean().sqrt()).item())
