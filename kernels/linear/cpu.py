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
DENSE = ("fp32", "fp16", "bf16")
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
    multiple = int(config["group"]) or 32
    if codes.shape[:-2] != (*lead, blocks) or columns != (ordered or cdiv(k, multiple) * multiple):
        raise ValueError(
            f"{what}: codes {tuple(codes.shape)} and perm of {ordered} do not pack a {list(shape)} weight"
        )
    rows = math.prod(lead) * blocks * 16
    need(
        dtype_name(codes.dtype) == "uint8" and codes.shape[-1] == 64,
        f"{what}: codes must be uint8 lines of 64 bytes, got {tuple(codes.shape)} {codes.dtype}",
    )
    for name, slot in (("codes", codes), ("scales", scales), ("zeros", zeros)):
        need(slot.is_contiguous(), f"{what}: {name} must be contiguous, got strides {tuple(slot.stride())}")
    need_plain(what, "fp32", row_scale=row_scale)
    need_plain(what, "int32", perm=perm)
    scaled = rows * (columns // group)
    kinds, zero_points, scaled_rows = _parts(config)
    for name, slot, sizes in (
        ("scales", scales, (scaled if kinds else 0,)),
        ("zeros", zeros, (scaled if zero_points else 0,)),
        ("row_scale", row_scale, (0, rows if scaled_rows else 0)),
    ):
        need(
            slot.numel() in sizes,
            f"{what}: planned for a scheme with {max(sizes) or 'no'} {name} for {list(shape)}, in groups of {group}; got {tuple(slot.shape)}: "
            "the plan must be of the weight's own scheme",
        )
    need(
        not kinds or dtype_name(scales.dtype) in kinds,
        f"{what}: planned for a scheme with scales of {' or '.join(kinds)}, got {scales.dtype}: the plan must be of the weight's own scheme",
    )


def _parts(config: Config) -> tuple[tuple[str, ...], bool, bool]:
    """What a weight of the scheme has: dtypes of its scales (none: it has none), zero points, scales of rows."""
    weight = next(name for name, code in FORMATS.items() if code == config["format"])
    if weight in DENSE:
        return (), False, False
    zero_points = weight in ("int4", "int8") and not config["zero"]
    if config["e8m0"]:
        return ("uint8",), zero_points, False
    return ("fp8",) if weight == "mxfp4" else ("fp32", "fp16", "bf16"), zero_points, weight == "mxfp4"


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
