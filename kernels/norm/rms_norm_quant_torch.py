"""RMSNorm with quantized output by torch: the reference itself, which does not synchronize."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.norm.rms_norm_quant import reference

if TYPE_CHECKING:
    from gristmill.kernels.calls import RmsNormQuantCall


def launch(config: Config, call: RmsNormQuantCall) -> None:
    """The arguments of `rms_norm_quant.reference`."""
    reference(call.x, call.residual, call.weight, call.eps, call.codes, call.scales, call.format, call.normed)


KERNEL = Kernel(
    op="rms_norm_quant",
    name="rms_norm_quant_torch",
    provider="torch",
    language="python",
    target=f"{__name__}:launch",
    requires=Requirement(packages=(("torch", "2.11"),)),
    supports=("normed",),
    summary="norm, then quantize_activation",
)
