"""Residual addition and RMSNorm by torch: an in-place addition, then `torch.nn.functional.rms_norm` in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement

if TYPE_CHECKING:
    from gristmill.kernels.calls import FusedAddRmsNormCall


def launch(config: Config, call: FusedAddRmsNormCall) -> None:
    """x [..., N], residual [..., N] (written in place), weight [N] -> out [..., N]."""
    import torch

    call.residual.add_(call.x)
    # torch rounds between its steps in half precision on CPU; float32 keeps the reference's single rounding.
    call.out.copy_(
        torch.nn.functional.rms_norm(
            call.residual.float(), (call.x.shape[-1],), call.weight.float(), call.eps
        )
    )


KERNEL = Kernel(
    op="fused_add_rms_norm",
    name="fused_add_rms_norm_torch",
    provider="torch",
    language="python",
    target=f"{__name__}:launch",
    requires=Requirement(packages=(("torch", "2.11"),)),
    summary="add_, then torch.nn.functional.rms_norm",
    supports=("w",),
)
