"""gelu(gate) · up by torch, in float32."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.activation.gelu_and_mul import CUBE, TWICE_ROOT

if TYPE_CHECKING:
    from gristmill.kernels.calls import GeluAndMulCall


def launch(config: Config, call: GeluAndMulCall) -> None:
    """x [..., 2N] -> out [..., N]."""
    import torch

    n = call.out.shape[-1]
    gate = call.x[..., :n].float()
    # 1 + tanh(z) and 1 + erf(z) cancel where z is negative; these forms do not.
    if call.approximate == "tanh":
        share = torch.sigmoid(TWICE_ROOT * (gate + CUBE * gate * gate * gate))
    else:
        share = 0.5 * torch.erfc(gate * -math.sqrt(0.5))
    call.out.copy_(torch.where(share > 0, gate * share, share) * call.x[..., n:])


KERNEL = Kernel(
    op="gelu_and_mul",
    name="gelu_and_mul_torch",
    provider="torch",
    language="python",
    target=f"{__name__}:launch",
    requires=Requirement(packages=(("torch", "2.11"),)),
    summary="sigmoid or erfc, and two products, in float32",
)
