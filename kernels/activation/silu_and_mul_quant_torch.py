"""silu(gate) · up with quantized output by torch: the reference itself, which does not synchronize."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.activation.silu_and_mul_quant import reference

if TYPE_CHECKING:
    from gristmill.kernels.calls import SiluAndMulQuantCall


def launch(config: Config, call: SiluAndMulQuantCall) -> None:
    """The arguments of `silu_and_mul_quant.reference`."""
    reference(call.x, call.codes, call.scales, call.format)


KERNEL = Kernel(
    op="silu_and_mul_quant",
    name="silu_and_mul_quant_torch",
    provider="torch",
    language="python",
    target=f"{__name__}:launch",
    requires=Requirement(packages=(("torch", "2.11"),)),
    summary="silu, mul, then quantize_activation",
)
