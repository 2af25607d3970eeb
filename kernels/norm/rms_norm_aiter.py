"""RMSNorm by AMD's AITER: `aiter.rmsnorm2d_fwd` on Instinct GPUs. Never run by us: it is used only where a policy pins it.

The `aiter` on PyPI is an unrelated package, so the probe asks for the module that defines the function, not for the name.
"""

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
    from aiter.ops.rmsnorm import rmsnorm2d_fwd

    host: Callable[..., Tensor] = rmsnorm2d_fwd
    return host


def launch(config: Config, call: RmsNormCall) -> None:
    """x [..., N], weight [N] -> out [..., N]."""
    n = call.x.shape[-1]
    # The public entry allocates its result; its other entry, which writes in place, is not in every release.
    call.out.view(-1, n).copy_(
        _host()(call.x.view(-1, n), call.weight, epsilon=call.eps)
    )  # by name: before 0.1.3 the third is a bias


def accepts(problem: Problem) -> str | None:
    """Half precision, which every release takes."""
    if problem.text("x") not in ("fp16", "bf16"):
        return f"aiter.rmsnorm2d_fwd takes fp16 and bf16 in every release, not {problem.text('x')}"
    return None


KERNEL = Kernel(
    op="rms_norm",
    name="rms_norm_aiter",
    provider="aiter",
    language="hip",
    target=f"{__name__}:launch",
    requires=Requirement.any(
        {"mfma"},
        vendors=("amd",),
        offers=("aiter.ops.rmsnorm:rmsnorm2d_fwd",),
        origin="https://github.com/ROCm/aiter (not PyPI's aiter)",
    ),
    summary="aiter.rmsnorm2d_fwd, unproven",
    accepts=accepts,
    priority=40,
    auto=False,
)
