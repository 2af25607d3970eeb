"""Permute in C++ for CPUs (`_permute_cpu.cpp`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.native import best_config
from gristmill.kernels.native_call import CallEntry

if TYPE_CHECKING:
    from gristmill.kernels.calls import PermuteCall

ENTRY = CallEntry("gm_moe_permute", "permute")


def launch(config: Config, call: PermuteCall) -> None:
    """ids [T, K] -> expert_offsets [experts + 1], permutation and inverse [T * K]."""
    ENTRY.cpu(config, call)


KERNEL = Kernel(
    op="permute",
    name="permute_cpu",
    provider="gristmill",
    language="cpp",
    target=f"{__name__}:launch",
    requires=Requirement(vendors=("cpu",), code="cpp"),
    summary="counting sort",
    config=best_config("gm_moe_permute"),
    batch_invariant=True,  # integers: nothing is rounded
    priority=100,
)
