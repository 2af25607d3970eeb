"""Linear in C++ for CPUs over cpu_rows16_v1 (`_linear_cpu.cpp`), every scheme, compiled for every ISA level."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme, cdiv
from gristmill.kernel_registry.target import Target
from gristmill.kernels.common import dtype_name, need, need_plain
from gristmill.kernels.native import best_config
from gristmill.kernels.native_call import CallEntry

if TYPE_CHECKING:
    from torch import Tensor

    from gristmill.kernels.calls import LinearCall

ENTRY = CallEntry("gm_linear_rows16", "linear")
FORMATS = {
    "int4": 0,
    "mxfp4": 1,
    "nvfp4": 1,
    "int8": 2,
    "fp8": 3,
    "mxfp8": 3,
    "fp32": 4,
    "fp16": 5,
    "bf16": 6,
}
_LEVEL = best_config("gm_linear_rows16")


def launch(config: Config, call: LinearCall) -> None:
    """x [..., K], the five tensors of cpu_rows16_v1 -> out [..., N or N / 2]."""
    try:
        ENTRY.cpu(config, call)
    except (TypeError, ValueError):
        need_rows16("linear_cpu", config, call.weight, *shape_of(call))
        raise


def shape_of(call: LinearCall) -> tuple[int, int]:
    """(N, K) of the weight."""
    return call.out.shape[-1] * (2 if call.silu_mul else 1), call.x.shape[-1]


def need_rows16(what: str, config: Config, weight: list[Tensor], *shape: int) -> None:
    """ValueError, which names `what`, unless the tensors are a weight [N, K] or [experts, N, K] of cpu_rows16_v1."""
    codes, scales, zeros, row_scale, perm = weight
    *lead, n, k = shape
    columns, ordered = codes.shape[-2] * int(config["columns"]), perm.numel()
    blocks, group = cdiv(n, 16), int(config["group"]) or columns
    if codes.shape[:-2] != (*lead, blocks) or columns < k * (not ordered) or (ordered and ordered != columns):
        raise ValueError(
            f"{what}: codes {tuple(codes.shape)} and perm of {ordered} do not pack a {list(shape)} weight"
        )
    rows = math.prod(lead) * blocks * 16
    need(
        dtype_name(codes.dtype) == "uint8" and codes.shape[-1] == 64,
        f"{what}: codes must be uint8 lines of 64 bytes, got {tuple(codes.shape)} {codes.dtype}",
    )
    need(
        row_scale.numel() in (0, rows),
        f"{what}: row_scale must be empty or hold {rows} numbers, got {tuple(row_scale.shape)}",
    )
    need_plain(what, "fp32", row_scale=row_scale)
    need_plain(what, "int32", perm=perm)
    for name, slot in (("codes", codes), ("scales", scales), ("zeros", zeros)):
        need(slot.is_contiguous(), f"{what}: {name} must be contiguous, got strides {tuple(slot.stride())}")
    scaled, zeroed = scales.numel(), zeros.numel()
    if (scaled and scaled != rows * (columns // group)) or (zeroed and zeroed != scaled):
        raise ValueError(
            f"{what}: scales {tuple(scales.shape)}, zeros {tuple(zeros.shape)} do not fit {list(shape)} in groups of {group}"
        )


def accepts(problem: Problem) -> str | None:
    """Weight-only and dense schemes of ALL_WEIGHT_SCHEMES."""
    scheme = QuantScheme.parse(problem.text("w"))
    if not scheme.is_named:
        return f"decodes the schemes of ALL_WEIGHT_SCHEMES, not {scheme}"
    return (
        None
        if scheme.activation is None
        else f"takes activations in their own dtype, not {scheme.activation}"
    )


def config(problem: Problem, target: Target) -> Config:
    """The code level, and what the scheme determines of a packed weight."""
    return {**_LEVEL(problem, target), **packing(QuantScheme.parse(problem.text("w")))}


def packing(scheme: QuantScheme) -> Config:
    """What a scheme determines of a packed weight: format, columns per line, group (0 = row), zero."""
    return {
        "format": FORMATS[scheme.weight],
        "columns": 32 // scheme.bits,
        "group": scheme.group_size or 0,
        "zero": scheme.implicit_zero,
        "e8m0": scheme.scale_dtype == "e8m0",
    }


KERNEL = Kernel(
    op="linear",
    name="linear_cpu",
    provider="gristmill",
    language="cpp",
    target=f"{__name__}:launch",
    requires=Requirement(vendors=("cpu",), code="cpp"),
    summary="16 output rows per vector, codes decoded exactly, groups summed in float32",
    accepts=accepts,
    config=config,
    layouts=("cpu_rows16_v1",),
    batch_invariant=True,
    priority=100,
)
