"""Sampling in C++ for CPUs (`_sample_cpu.cpp`)."""

from __future__ import annotations

from ctypes import c_int, c_int64, c_void_p
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.common import DTYPE_CODES, dtype_name
from gristmill.kernels.native import best_config, check, cpu_function

if TYPE_CHECKING:
    from gristmill.kernels.calls import SampleCall

ARGUMENTS = (c_void_p, c_int64, *(c_void_p,) * 7, c_int64, c_int64, c_int)


def launch(config: Config, call: SampleCall) -> None:
    """logits [B, V] -> ids [B]."""
    code = cpu_function("gm_sample", config["level"], ARGUMENTS)(
        call.logits.data_ptr(),
        call.logits.stride(0),
        call.temperature.data_ptr(),
        call.top_k.data_ptr(),
        call.top_p.data_ptr(),
        call.min_p.data_ptr(),
        call.seed.data_ptr(),
        call.index.data_ptr(),
        call.ids.data_ptr(),
        call.logits.shape[0],
        call.logits.shape[1],
        DTYPE_CODES[dtype_name(call.logits.dtype)],
    )
    check(code, "sample_cpu")


KERNEL = Kernel(
    op="sample",
    name="sample_cpu",
    provider="gristmill",
    language="cpp",
    target=f"{__name__}:launch",
    requires=Requirement(vendors=("cpu",), code="cpp"),
    summary="filters by bisection; float64 noise only for tokens that a float32 bound lets win",
    config=best_config("gm_sample"),
    batch_invariant=True,
    priority=100,
)
