"""silu(gate) · up with quantized output in C++ for CPUs (`_silu_and_mul_quant_cpu.cpp`), compiled for every ISA level."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.native import best_config
from gristmill.kernels.native_call import CallEntry

if TYPE_CHECKING:
    from gristmill.kernels.calls import SiluAndMulQuantCall

ENTRY = CallEntry("gm_silu_and_mul_quant", "silu_and_mul_quant")


def launch(config: Config, call: SiluAndMulQuantCall) -> None:
    """The arguments of `silu_and_mul_quant.reference`."""
    ENTRY.cpu(config, call)


KERNEL = Kernel(
    op="silu_and_mul_quant",
    name="silu_and_mul_quant_cpu",
    provider="gristmill",
    language="cpp",
    target=f"{__name__}:launch",
    requires=Requirement(vendors=("cpu",), code="cpp"),
    summary="rows over threads, values computed for the largest and again for the codes",
    config=best_config("gm_silu_and_mul_quant"),
    batch_invariant=True,
    priority=100,
)
