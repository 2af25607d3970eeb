"""Residual addition and RMSNorm in C++ for CPUs (`_fused_add_rms_norm_cpu.cpp`), compiled for every ISA level."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.native import best_config
from gristmill.kernels.native_call import CallEntry

if TYPE_CHECKING:
    from gristmill.kernels.calls import FusedAddRmsNormCall

ENTRY = CallEntry("gm_fused_add_rms_norm", "fused_add_rms_norm")


def launch(config: Config, call: FusedAddRmsNormCall) -> None:
    """x [..., N], residual [..., N] (written in place), weight [N] -> out [..., N]."""
    ENTRY.cpu(config, call)


KERNEL = Kernel(
    op="fused_add_rms_norm",
    name="fused_add_rms_norm_cpu",
    provider="gristmill",
    language="cpp",
    target=f"{__name__}:launch",
    requires=Requirement(vendors=("cpu",), code="cpp"),
    summary="one row a task, the sum stored and squared in one pass",
    config=best_config("gm_fused_add_rms_norm"),
    supports=("w",),
    batch_invariant=True,
    priority=100,
)
