"""RMSNorm in C++ for CPUs (`_rms_norm_cpu.cpp`), compiled for every ISA level."""

from __future__ import annotations

from ctypes import c_float, c_int, c_int64, c_void_p
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.common import DTYPE_CODES, dtype_name, row_stride
from gristmill.kernels.native import best_config, check, cpu_function

if TYPE_CHECKING:
    from gristmill.kernels.calls import RmsNormCall

ARGUMENTS = (c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_float, c_int)


def launch(config: Config, call: RmsNormCall) -> None:
    """x [..., N], weight [N] -> out [..., N]."""
    n = call.x.shape[-1]
    code = cpu_function("gm_rms_norm", config["level"], ARGUMENTS)(
        call.x.data_ptr(),
        row_stride(call.x),
        call.weight.data_ptr(),
        call.out.data_ptr(),
        row_stride(call.out),
        call.x.numel() // n,
        n,
        call.eps,
        DTYPE_CODES[dtype_name(call.x.dtype)],
    )
    check(code, "rms_norm_cpu")


KERNEL = Kernel(
    op="rms_norm",
    name="rms_norm_cpu",
    provider="gristmill",
    language="cpp",
    target=f"{__name__}:launch",
    requires=Requirement(vendors=("cpu",), code="cpp"),
    summary="one row a task, two fma chains, float32 inside",
    config=best_config("gm_rms_norm"),
    batch_invariant=True,
    priority=100,
)
