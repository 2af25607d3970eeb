"""Grouped top-k in C++ for CPUs (`_grouped_topk_cpu.cpp`)."""

from __future__ import annotations

from ctypes import c_float, c_int, c_int64, c_void_p
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.common import DTYPE_CODES, dtype_name, row_stride
from gristmill.kernels.native import best_config, check, cpu_function

if TYPE_CHECKING:
    from gristmill.kernels.calls import GroupedTopkCall

ARGUMENTS = (c_void_p, c_int64, c_void_p, c_void_p, c_void_p, *(c_int64,) * 5, c_int, c_int, c_float, c_int)


def launch(config: Config, call: GroupedTopkCall) -> None:
    """logits [..., E] -> weights, ids [..., top_k]."""
    experts = call.logits.shape[-1]
    code = cpu_function("gm_grouped_topk", config["level"], ARGUMENTS)(
        call.logits.data_ptr(),
        row_stride(call.logits),
        None if call.bias is None else call.bias.data_ptr(),
        call.weights.data_ptr(),
        call.ids.data_ptr(),
        call.logits.numel() // experts,
        experts,
        call.top_k,
        call.n_group,
        call.topk_group,
        call.scoring == "sigmoid",
        call.renormalize,
        call.scale,
        DTYPE_CODES[dtype_name(call.logits.dtype)],
    )
    check(code, "grouped_topk_cpu")


KERNEL = Kernel(
    op="grouped_topk",
    name="grouped_topk_cpu",
    provider="gristmill",
    language="cpp",
    target=f"{__name__}:launch",
    requires=Requirement(vendors=("cpu",), code="cpp"),
    summary="scores by vectors, then repeated maximum of integer keys",
    config=best_config("gm_grouped_topk"),
    batch_invariant=True,
    priority=100,
)
