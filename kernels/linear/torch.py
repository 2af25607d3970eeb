"""Dense linear by torch: `torch.nn.functional.linear` (cuBLAS, oneDNN, MKL)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme

if TYPE_CHECKING:
    from torch import Tensor


def launch(
    config: Config,
    x: Tensor,
    weight: list[Tensor],
    bias: Tensor | None,
    residual: Tensor | None,
    silu_mul: bool,
    n: int,
    workspace: Tensor | None,
    out: Tensor,
) -> None:
    """x [..., K], one dense tensor [N, K] -> out [..., N or N / 2]."""
    import torch

    from gristmill.kernels.linear._epilogue import finish

    dense = weight[0]
    if dense.dtype != x.dtype:
        x, dense = x.float(), dense.float()
    if bias is None and residual is None and not silu_mul and x.dtype == out.dtype:
        torch.mm(x.reshape(-1, x.shape[-1]), dense.T, out=out.view(-1, out.shape[-1]))
        return
    finish(torch.nn.functional.linear(x, dense), bias, residual, silu_mul, out)


def accepts(problem: Problem) -> str | None:
    """Dense weights only."""
    scheme = QuantScheme.parse(problem.text("w"))
    return None if scheme.is_dense else f"multiplies dense weights, not {scheme}"


KERNEL = Kernel(
    op="linear",
    name="linear_torch",
    provider="torch",
    language="python",
    target=f"{__name__}:launch",
    requires=Requirement(packages=(("torch", "2.11"),)),
    summary="torch.nn.functional.linear",
    accepts=accepts,
    layouts=("dense_v1",),
    priority=60,  # above the portable Triton kernel: before any measurement, a vendor library is the better guess
)
