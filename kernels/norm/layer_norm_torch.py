"""LayerNorm by torch: `torch.nn.functional.layer_norm` in float32, which accumulates in float32 and rounds half precision once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement

if TYPE_CHECKING:
    from gristmill.kernels.calls import LayerNormCall


def launch(config: Config, call: LayerNormCall) -> None:
    """The arguments of `layer_norm.reference`, then out [..., N]."""
    import torch

    bias = None if call.bias is None else call.bias.float()
    x = call.x if call.residual is None else call.residual.add_(call.x)
    shape = (x.shape[-1],)
    call.out.copy_(torch.nn.functional.layer_norm(x.float(), shape, call.weight.float(), bias, call.eps))


KERNEL = Kernel(
    op="layer_norm",
    name="layer_norm_torch",
    provider="torch",
    language="python",
    target=f"{__name__}:launch",
    requires=Requirement(packages=(("torch", "2.11"),)),
    summary="torch.nn.functional.layer_norm",
    supports=("residual",),
)
