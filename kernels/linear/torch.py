"""Dense linear by torch: `torch.nn.functional.linear` (cuBLAS, oneDNN, MKL)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme

if TYPE_CHECKING:
    from gristmill.kernels.calls import LinearCall


def launch(config: Config, call: LinearCall) -> None:
    """x [..., K], one dense tensor [N, K] -> out [..., N or N / 2]."""
    import torch

    x = call.x
    dense = call.weight[0]
    if dense.dtype != x.dtype:
        x, dense = x.float(), dense.float()
    if call.bias is None and call.residual is None and not call.silu_mul and x.dtype == call.out.dtype:
        torch.mm(x.reshape(-1, x.shape[-1]), dense.T, out=call.out.view(-1, call.out.shape[-1]))
        return
    from gristmill.kernels.linear._epilogue import finish  # here, for an import costs 0.3 us per call

    finish(torch.nn.functional.linear(x, dense), call.bias, call.residual, call.silu_mul, call.out)


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
