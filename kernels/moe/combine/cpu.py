"""Combine in C++ for CPUs (`_combine_cpu.cpp`)."""

from __future__ import annotations

from ctypes import c_int, c_int64, c_void_p
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.common import DTYPE_CODES, dtype_name
from gristmill.kernels.native import best_config, check, cpu_function

if TYPE_CHECKING:
    from torch import Tensor

ARGUMENTS = (c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int)


def launch(config: Config, y: Tensor, inverse: Tensor, weights: Tensor, out: Tensor) -> None:
    """y [P, H] -> out [T, H]."""
    tokens, top_k = weights.shape
    code = cpu_function("gm_moe_combine", config["level"], ARGUMENTS)(
        y.data_ptr(),
        y.shape[0],
        y.shape[1],
        inverse.data_ptr(),
        weights.data_ptr(),
        out.data_ptr(),
        tokens,
        top_k,
        y.shape[1],
        DTYPE_CODES[dtype_name(y.dtype)],
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
