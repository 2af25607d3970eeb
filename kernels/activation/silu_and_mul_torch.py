"""silu(gate) · up by torch, in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement

if TYPE_CHECKING:
    from gristmill.kernels.calls import SiluAndMulCall


def launch(config: Config, call: SiluAndMulCall) -> None:
    """x [..., 2N] -> out [..., N]."""
    import torch

    n = call.out.shape[-1]
    gate = torch.nn.functional.silu(call.x[..., :n].float())
    torch.mul(gate, call.x[..., n:], out=gate)
    call.out.copy_(gate)


KERNEL = Kernel(
    op="silu_and_mul",
    name="silu_and_mul_torch",
    provider="torch",
    language="python",
    target=f"{__name__}:launch",
    requires=Requirement(packages=(("torch", "2.11"),)),
    summary="torch.nn.functional.silu, then mul",
)
