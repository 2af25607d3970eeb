"""RMSNorm by FlashInfer: `flashinfer.norm.rmsnorm`, compiled by FlashInfer itself at first use (or taken from its cache)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement

if TYPE_CHECKING:
    from torch import Tensor

    from gristmill.kernels.calls import RmsNormCall


@cache
def _host() -> Callable[..., Tensor]:
    from flashinfer.norm import rmsnorm

    host: Callable[..., Tensor] = rmsnorm
    return host


def launch(config: Config, call: RmsNormCall) -> None:
    """x [..., N], weight [N] -> out [..., N]."""
    n = call.x.shape[-1]
    # FlashInfer takes rows of any stride; a view of rows that flatten never copies.
    _host()(call.x.view(-1, n), call.weight, call.eps, out=call.out.view(-1, n))


def accepts(problem: Problem) -> str | None:
    """FlashInfer compiles its norms for half precision only."""
    if problem.text("x") not in ("fp16", "bf16"):
        return f"flashinfer.norm.rmsnorm takes fp16 and bf16, not {problem.text('x')}"
    return None


KERNEL = Kernel(
    op="rms_norm",
    name="rms_norm_flashinfer",
    provider="flashinfer",
    language="cuda",
    target=f"{__name__}:launch",
    requires=Requirement.any(  # FlashInfer starts at sm_75
        {"ldmatrix"},
        vendors=("nvidia",),
        packages=(("flashinfer-python", "0.2.5"),),
        offers=("flashinfer.norm:rmsnorm",),
    ),
    summary="flashinfer.norm.rmsnorm",
    accepts=accepts,
    priority=40,
    waits=True,
    triggers=True,
)
