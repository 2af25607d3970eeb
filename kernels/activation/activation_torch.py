"""An activation of every value by torch, in float32."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.activation.gelu_and_mul import CUBE, TWICE_ROOT

if TYPE_CHECKING:
    from gristmill.kernels.calls import ActivationCall


def launch(config: Config, call: ActivationCall) -> None:
    """x [..., N] -> out [..., N]."""
    import torch

    x = call.x.float()
    if call.function in ("relu", "relu2"):
        x = torch.relu(x)
        call.out.copy_(x.square_() if call.function == "relu2" else x)
        return
    # 1 + tanh(z) and 1 + erf(z) cancel where z is negative; these forms do not.
    if call.function == "gelu":
        share = 0.5 * torch.erfc(x * -math.sqrt(0.5))
    else:
        share = torch.sigmoid(TWICE_ROOT * (x + CUBE * x * x * x) if call.function == "gelu_tanh" else x)
    call.out.copy_(torch.where(share > 0, x * share, share))


KERNEL = Kernel(
    op="activation",
    name="activation_torch",
    provider="torch",
    language="python",
    target=f"{__name__}:launch",
    requires=Requirement(packages=(("torch", "2.11"),)),
    summary="sigmoid or erfc, and a product, in float32",
)
