"""Sampling in C++ for CPUs (`_sample_cpu.cpp`)."""

from __future__ import annotations

from ctypes import c_int, c_int64, c_void_p
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.common import DTYPE_CODES, dtype_name
from gristmill.kernels.native import best_config, check, cpu_function

if TYPE_CHECKING:
    from torch import Tensor

ARGUMENTS = (c_void_p, c_int64, *(c_void_p,) * 7, c_int64, c_int64, c_int)


def launch(
    config: Config,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    index: Tensor,
    workspace: Tensor | None,
    ids: Tensor,
) -> None:
    """logits [B, V] -> ids [B]."""
    code = cpu_function("gm_sample", config["level"], ARGUMENTS)(
        logits.data_ptr(),
        logits.stride(0),
        temperature.data_ptr(),
        top_k.data_ptr(),
        top_p.data_ptr(),
        min_p.data_ptr(),
        seed.data_ptr(),
        index.data_ptr(),
        ids.data_ptr(),
        logits.shape[0],
        logits.shape[1],
        DTYPE_CODES[dtype_name(logits.dtype)],
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
