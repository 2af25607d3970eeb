"""RMSNorm in C++ for CPUs (`_rms_norm_cpu.cpp`), compiled for every ISA level."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.native import best_config
from gristmill.kernels.native_call import CallEntry

if TYPE_CHECKING:
    from gristmill.kernels.calls import RmsNormCall

ENTRY = CallEntry("gm_rms_norm", "rms_norm")


def launch(config: Config, call: RmsNormCall) -> None:
    """x [..., N], weight [N] -> out [..., N]."""
    ENTRY.cpu(config, call)


KERNEL = Kernel(
    op="rms_norm",
    name="rms_norm_cpu",
    provider="gristmill",
    language="cpp",
    target=f"{__name__}:launch",
    requires=Requirement(vendors=("cpu",), code="cpp"),
    summary="one row a task, two fma chains, float32 inside",
    config=best_config("gm_rms_norm"),
    supports=("w",),
    batch_invariant=True,
    priority=100,
)
