"""Combine in C++ for CPUs (`_combine_cpu.cpp`)."""

from __future__ import annotations

from ctypes import c_int, c_int64, c_void_p
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.common import DTYPE_CODES, dtype_name
from gristmill.kernels.native import best_config, check, cpu_function

if TYPE_CHECKING:
    from gristmill.kernels.calls import CombineCall

ARGUMENTS = (c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int)


def launch(config: Config, call: CombineCall) -> None:
    """y [P, H] -> out [T, H]."""
    tokens, top_k = call.weights.shape
    code = cpu_function("gm_moe_combine", config["level"], ARGUMENTS)(
        call.y.data_ptr(),
        call.y.shape[0],
        call.y.shape[1],
        call.inverse.data_ptr(),
        call.weights.data_ptr(),
        call.out.data_ptr(),
        tokens,
        top_k,
        call.y.shape[1],
        DTYPE_CODES[dtype_name(call.y.dtype)],
    )
    check(code, "combine_cpu")


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
