"""Permute in C++ for CPUs (`_permute_cpu.cpp`)."""

from __future__ import annotations

from ctypes import c_int64, c_void_p
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.native import best_config, check, cpu_function

if TYPE_CHECKING:
    from gristmill.kernels.calls import PermuteCall

ARGUMENTS = (*(c_void_p,) * 4, c_int64, c_int64)


def launch(config: Config, call: PermuteCall) -> None:
    """ids [T, K] -> expert_offsets [experts + 1], permutation and inverse [T * K]."""
    code = cpu_function("gm_moe_permute", config["level"], ARGUMENTS)(
        call.ids.data_ptr(),
        call.expert_offsets.data_ptr(),
        call.permutation.data_ptr(),
        call.inverse.data_ptr(),
        call.ids.numel(),
        call.experts,
    )
    check(code, "permute_cpu")


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
