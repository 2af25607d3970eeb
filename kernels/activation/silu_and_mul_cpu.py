"""silu(gate) · up in C++ for CPUs (`_silu_and_mul_cpu.cpp`), compiled for every ISA level."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.native import best_config
from gristmill.kernels.native_call import CallEntry

if TYPE_CHECKING:
    from gristmill.kernels.calls import SiluAndMulCall

ENTRY = CallEntry("gm_silu_and_mul", "silu_and_mul")


def launch(config: Config, call: SiluAndMulCall) -> None:
    """x [..., 2N] -> out [..., N]."""
    ENTRY.cpu(config, call)


KERNEL = Kernel(
    op="silu_and_mul",
    name="silu_and_mul_cpu",
    provider="gristmill",
    language="cpp",
    target=f"{__name__}:launch",
    requires=Requirement(vendors=("cpu",), code="cpp"),
    summary="vector exp within 2 ulp, float32 inside",
    config=best_config("gm_silu_and_mul"),
    batch_invariant=True,
    priority=100,
)
