"""gelu(gate) · up in C++ for CPUs (`_activation_cpu.cpp`), compiled for every ISA level."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.native import best_config
from gristmill.kernels.native_call import CallEntry

if TYPE_CHECKING:
    from gristmill.kernels.calls import GeluAndMulCall

ENTRY = CallEntry("gm_gelu_and_mul", "gelu_and_mul")


def launch(config: Config, call: GeluAndMulCall) -> None:
    """x [..., 2N] -> out [..., N]."""
    ENTRY.cpu(config, call)


KERNEL = Kernel(
    op="gelu_and_mul",
    name="gelu_and_mul_cpu",
    provider="gristmill",
    language="cpp",
    target=f"{__name__}:launch",
    requires=Requirement(vendors=("cpu",), code="cpp"),
    summary="vector exp and erfc, float32 inside",
    config=best_config("gm_gelu_and_mul"),
    batch_invariant=True,
    priority=100,
)
