"""silu(gate) · up in C++ for CPUs (`_silu_and_mul_cpu.cpp`), compiled for every ISA level."""

from __future__ import annotations

from ctypes import c_int, c_int64, c_void_p
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.common import DTYPE_CODES, dtype_name, row_stride
from gristmill.kernels.native import best_config, check, cpu_function

if TYPE_CHECKING:
    from gristmill.kernels.calls import SiluAndMulCall

ARGUMENTS = (c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int64, c_int)


def launch(config: Config, call: SiluAndMulCall) -> None:
    """x [..., 2N] -> out [..., N]."""
    n = call.out.shape[-1]
    code = cpu_function("gm_silu_and_mul", config["level"], ARGUMENTS)(
        call.x.data_ptr(),
        row_stride(call.x),
        call.out.data_ptr(),
        row_stride(call.out),
        call.out.numel() // n,
        n,
        DTYPE_CODES[dtype_name(call.x.dtype)],
    )
    check(code, "silu_and_mul_cpu")


KERNEL = Kernel(
    op="silu_and_mul",
    name="silu_and_mul_cpu",
    provider="gristmill",
    language="cpp",
    target=f"{__name__}:launch",
    requires=Requirement(vendors=("cpu",), code="cpp"),
    summary="vector exp within 2 ulp, float32 inside",
    config=best_config("gm_silu_and_mul"),
    batch_invariant=True,
    priority=100,
)
