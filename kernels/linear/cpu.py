"""Linear in C++ for CPUs over cpu_rows16_v1 (`_linear_cpu.cpp`), every scheme, compiled for every ISA level."""

from __future__ import annotations

from ctypes import c_int, c_int64, c_void_p
from typing import TYPE_CHECKING, Any

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme, cdiv
from gristmill.kernel_registry.target import Target
from gristmill.kernels.common import DTYPE_CODES, dtype_name, need, need_plain, row_stride
from gristmill.kernels.native import best_config, check, cpu_function

if TYPE_CHECKING:
    from torch import Tensor

    from gristmill.kernels.calls import LinearCall

ARGUMENTS = (c_void_p, c_int64, *(c_void_p,) * 8, *(c_int64,) * 5, *(c_int,) * 6)
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
NONE, E8M0 = -1, 20
_LEVEL = best_config("gm_linear_rows16")


def launch(config: Config, call: LinearCall) -> None:
    """x [..., K], the five tensors of cpu_rows16_v1 -> out [..., N or N / 2]."""
    arguments = native_arguments(
        "linear_cpu", config, call.x, call.weight, call.bias, call.residual, call.silu_mul, call.out
    )
    code = cpu_function("gm_linear_rows16", config["level"], ARGUMENTS)(*arguments)
    check(code, "linear_cpu")


def native_arguments(
    kernel: str,
    config: Config,
    x: Tensor,
    weight: list[Tensor],
    bias: Tensor | None,
    residual: Tensor | None,
    silu_mul: bool,
    out: Tensor,
) -> tuple[Any, ...]:
    """The arguments of gm_linear_rows16; ValueError, which names `kernel`, unless the tensors fit each other."""
    codes, scales, zeros, row_scale, perm = weight
    k, rows = x.shape[-1], out.shape[-1] * (2 if silu_mul else 1)
    columns = codes.shape[1] * int(config["columns"])
    group = int(config["group"]) or columns
    blocks, ordered = cdiv(rows, 16), perm.numel()
    if codes.shape[0] != blocks or columns < k * (not ordered) or (ordered and ordered != columns):
        raise ValueError(
            f"{kernel}: codes {tuple(codes.shape)} and perm of {ordered} do not pack a [{rows}, {k}] weight"
        )
    need_slots(kernel, weight, blocks)
    scaled, zeroed = scales.numel(), zeros.numel()
    if (scaled and scaled != blocks * (columns // group) * 16) or (zeroed and zeroed != scaled):
        raise ValueError(
            f"{kernel}: scales {tuple(scales.shape)}, zeros {tuple(zeros.shape)} do not fit [{rows}, {k}] "
            f"in groups of {group}"
        )
    scale_type = NONE if not scaled else E8M0 if config["e8m0"] else DTYPE_CODES[dtype_name(scales.dtype)]
    return (
        x.data_ptr(),
        row_stride(x),
        codes.data_ptr(),
        scales.data_ptr(),
        zeros.data_ptr(),
        row_scale.data_ptr() if row_scale.numel() else None,
        perm.data_ptr() if ordered else None,
        None if bias is None else bias.data_ptr(),
        None if residual is None else residual.data_ptr(),
        out.data_ptr(),
        x.numel() // k,
        rows,
        k,
        columns,
        group,
        config["format"],
        scale_type,
        DTYPE_CODES[dtype_name(zeros.dtype)] if zeroed else NONE,
        0 if zeroed else config["zero"],
        int(silu_mul),
        DTYPE_CODES[dtype_name(x.dtype)],
    )


def need_slots(op: str, weight: list[Tensor], blocks: int) -> None:
    """ValueError unless the five tensors of cpu_rows16_v1 have the dtypes, sizes and strides that the C++ code assumes."""
    codes, scales, zeros, row_scale, perm = weight
    if dtype_name(codes.dtype) != "uint8" or codes.shape[-1] != 64:
        raise ValueError(
            f"{op}: codes must be uint8 lines of 64 bytes, got {tuple(codes.shape)} {codes.dtype}"
        )
    if row_scale.numel() not in (0, blocks * 16):
        raise ValueError(
            f"{op}: row_scale must be empty or hold {blocks * 16} numbers, got {tuple(row_scale.shape)}"
        )
    need_plain(op, "fp32", row_scale=row_scale)
    need_plain(op, "int32", perm=perm)
    for name, slot in (("codes", codes), ("scales", scales), ("zeros", zeros)):
        need(slot.is_contiguous(), f"{op}: {name} must be contiguous, got strides {tuple(slot.stride())}")


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
