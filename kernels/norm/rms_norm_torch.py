"""RMSNorm by torch: `torch.nn.functional.rms_norm` (fused on CUDA; composed on CPU)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement

if TYPE_CHECKING:
    from gristmill.kernels.calls import RmsNormCall


def launch(config: Config, call: RmsNormCall) -> None:
    """x [..., N], weight [N] -> out [..., N]."""
    import torch

    if call.x.dtype == torch.float32:
        call.out.copy_(torch.nn.functional.rms_norm(call.x, (call.x.shape[-1],), call.weight, call.eps))
    else:
        # torch rounds between its steps in half precision on CPU; float32 keeps the reference's single rounding.
        call.out.copy_(
            torch.nn.functional.rms_norm(call.x.float(), (call.x.shape[-1],), call.weight.float(), call.eps)
        )


KERNEL = Kernel(
    op="rms_norm",
    name="rms_norm_torch",
    provider="torch",
    language="python",
    target=f"{__name__}:launch",
    requires=Requirement(packages=(("torch", "2.11"),)),
    summary="torch.nn.functional.rms_norm",
    supports=("w",),
)
