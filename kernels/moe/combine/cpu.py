"""Combine in C++ for CPUs (`_combine_cpu.cpp`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.native import best_config
from gristmill.kernels.native_call import CallEntry

if TYPE_CHECKING:
    from gristmill.kernels.calls import CombineCall

ENTRY = CallEntry("gm_moe_combine", "combine")


def launch(config: Config, call: CombineCall) -> None:
    """y [P, H] -> out [T, H]."""
    ENTRY.cpu(config, call)


KERNEL = Kernel(
    op="combine",
    name="combine_cpu",
    provider="gristmill",
    language="cpp",
    target=f"{__name__}:launch",
    requires=Requirement(vendors=("cpu",), code="cpp"),
    summary="float32 sums in registers, k in order",
    config=best_config("gm_moe_combine"),
    batch_invariant=True,
    priority=100,
)
