"""RMSNorm by torch: `torch.nn.functional.rms_norm` (fused on CUDA; composed on CPU)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement

if TYPE_CHECKING:
    from torch import Tensor


def launch(config: Config, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """x [..., N], weight [N] -> out [..., N]."""
    import torch

    if x.dtype == torch.float32:
        out.copy_(torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps))
    else:
        # torch rounds between its steps in half precision on CPU; float32 keeps the reference's single rounding.
        out.copy_(torch.nn.functional.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps))


KERNEL = Kernel(
    op="rms_norm",
    name="rms_norm_torch",
    provider="torch",
    language="python",
    target=f"{__name__}:launch",
    requires=Requirement(packages=(("torch", "2.11"),)),
    summary="torch.nn.functional.rms_norm",
)
