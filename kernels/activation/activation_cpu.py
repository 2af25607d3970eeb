"""An activation of every value in C++ for CPUs (`_activation_cpu.cpp`), compiled for every ISA level."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.native import best_config
from gristmill.kernels.native_call import CallEntry

if TYPE_CHECKING:
    from gristmill.kernels.calls import ActivationCall

ENTRY = CallEntry("gm_activation", "activation")


def launch(config: Config, call: ActivationCall) -> None:
    """x [..., N] -> out [..., N]."""
    ENTRY.cpu(config, call)


KERNEL = Kernel(
    op="activation",
    name="activation_cpu",
    provider="gristmill",
    language="cpp",
    target=f"{__name__}:launch",
    requires=Requirement(vendors=("cpu",), code="cpp"),
    summary="vector exp and erfc, float32 inside",
    config=best_config("gm_activation"),
    batch_invariant=True,
    priority=100,
)
