"""RMSNorm with quantized output in C++ for CPUs (`_rms_norm_quant_cpu.cpp`), compiled for every ISA level."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.native import best_config
from gristmill.kernels.native_call import CallEntry

if TYPE_CHECKING:
    from gristmill.kernels.calls import RmsNormQuantCall

ENTRY = CallEntry("gm_rms_norm_quant", "rms_norm_quant")


def launch(config: Config, call: RmsNormQuantCall) -> None:
    """The arguments of `rms_norm_quant.reference`."""
    ENTRY.cpu(config, call)


KERNEL = Kernel(
    op="rms_norm_quant",
    name="rms_norm_quant_cpu",
    provider="gristmill",
    language="cpp",
    target=f"{__name__}:launch",
    requires=Requirement(vendors=("cpu",), code="cpp"),
    supports=("normed",),
    summary="rows over threads, values computed for the largest and again for the codes",
    config=best_config("gm_rms_norm_quant"),
    batch_invariant=True,
    priority=100,
)
