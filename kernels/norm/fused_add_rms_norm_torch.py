"""Residual addition and RMSNorm by torch: an in-place addition, then `torch.nn.functional.rms_norm` in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement

if TYPE_CHECKING:
    from torch import Tensor


def launch(config: Config, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """x [..., N], residual [..., N] (written in place), weight [N] -> out [..., N]."""
    import torch

    residual.add_(x)
    # torch rounds between its steps in half precision on CPU; float32 keeps the reference's single rounding.
    out.copy_(torch.nn.functional.rms_norm(residual.float(), (x.shape[-1],), weight.float(), eps))


KERNEL = Kernel(
    op="fused_add_rms_norm",
    name="fused_add_rms_norm_torch",
    provider="torch",
    language="python",
    target=f"{__name__}:launch",
    requires=Requirement(packages=(("torch", "2.11"),)),
    summary="add_, then torch.nn.functional.rms_norm",
)
