"""RMSNorm in C++ for CPUs (`_rms_norm_cpu.cpp`), compiled for every ISA level."""

from __future__ import annotations

from ctypes import c_float, c_int, c_int64, c_void_p
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.common import DTYPE_CODES, dtype_name, row_stride
from gristmill.kernels.native import best_config, check, cpu_function

if TYPE_CHECKING:
    from torch import Tensor

ARGUMENTS = (c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_float, c_int)


def launch(config: Config, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """x [..., N], weight [N] -> out [..., N]."""
    n = x.shape[-1]
    code = cpu_function("gm_rms_norm", config["level"], ARGUMENTS)(
        x.data_ptr(),
        row_stride(x),
        weight.data_ptr(),
        out.data_ptr(),
        row_stride(out),
        x.numel() // n,
        n,
        eps,
        DTYPE_CODES[dtype_name(x.dtype)],
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
