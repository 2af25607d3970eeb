"""Grouped top-k in C++ for CPUs (`_grouped_topk_cpu.cpp`)."""

from __future__ import annotations

from ctypes import c_float, c_int, c_int64, c_void_p
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.common import DTYPE_CODES, dtype_name, row_stride
from gristmill.kernels.native import best_config, check, cpu_function

if TYPE_CHECKING:
    from torch import Tensor

ARGUMENTS = (c_void_p, c_int64, c_void_p, c_void_p, c_void_p, *(c_int64,) * 5, c_int, c_int, c_float, c_int)


def launch(
    config: Config,
    logits: Tensor,
    top_k: int,
    bias: Tensor | None,
    n_group: int,
    topk_group: int,
    scoring: str,
    renormalize: bool,
    scale: float,
    weights: Tensor,
    ids: Tensor,
) -> None:
    """logits [..., E] -> weights, ids [..., top_k]."""
    experts = logits.shape[-1]
    code = cpu_function("gm_grouped_topk", config["level"], ARGUMENTS)(
        logits.data_ptr(),
        row_stride(logits),
        None if bias is None else bias.data_ptr(),
        weights.data_ptr(),
        ids.data_ptr(),
        logits.numel() // experts,
        experts,
        top_k,
        n_group,
        topk_group,
        scoring == "sigmoid",
        renormalize,
        scale,
        DTYPE_CODES[dtype_name(logits.dtype)],
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
