"""RMSNorm with quantized output in C++ for CPUs (`_rms_norm_quant_cpu.cpp`), compiled for every ISA level."""

from __future__ import annotations

from ctypes import c_float, c_int, c_int64, c_void_p
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.target import Target
from gristmill.kernels.common import DTYPE_CODES, dtype_name, row_stride
from gristmill.kernels.native import best_config, check, cpu_function
from gristmill.kernels.quantized_rows import config_of

if TYPE_CHECKING:
    from gristmill.kernels.calls import RmsNormQuantCall

ARGUMENTS = (
    *(c_void_p, c_int64) * 2,
    *(c_void_p,) * 2,
    c_int64,
    c_void_p,
    *(c_int64,) * 2,
    c_float,
    c_int64,
    *(c_float,) * 2,
    c_int,
)
_LEVEL = best_config("gm_rms_norm_quant")


def launch(config: Config, call: RmsNormQuantCall) -> None:
    """The arguments of `rms_norm_quant.reference`."""
    n = call.codes.shape[-1]
    code = cpu_function("gm_rms_norm_quant", config["level"], ARGUMENTS)(
        call.x.data_ptr(),
        row_stride(call.x),
        None if call.residual is None else call.residual.data_ptr(),
        0 if call.residual is None else row_stride(call.residual),
        call.weight.data_ptr(),
        call.codes.data_ptr(),
        row_stride(call.codes),
        call.scales.data_ptr(),
        call.codes.numel() // n,
        n,
        call.eps,
        config["group"],
        config["least"],
        config["top"],
        DTYPE_CODES[dtype_name(call.x.dtype)],
    )
    check(code, "rms_norm_quant_cpu")


def config(problem: Problem, target: Target) -> Config:
    """The code level, and the format."""
    return {**_LEVEL(problem, target), **config_of(problem)}


KERNEL = Kernel(
    op="rms_norm_quant",
    name="rms_norm_quant_cpu",
    provider="gristmill",
    language="cpp",
    target=f"{__name__}:launch",
    requires=Requirement(vendors=("cpu",), code="cpp"),
    summary="rows over threads, values computed for the largest and again for the codes",
    config=config,
    batch_invariant=True,
    priority=100,
)
