"""Grouped linear in C++ for CPUs (`_grouped_linear_cpu.cpp`): linear's core, expert by expert, only those that have rows."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernel_registry.target import Target
from gristmill.kernels.common import DTYPE_CODES, dtype_name
from gristmill.kernels.linear.cpu import E8M0, NONE, need_slots
from gristmill.kernels.linear.cpu import config as linear_config
from gristmill.kernels.moe.grouped_linear.torch import accepts_named
from gristmill.kernels.native import best_config, check, cpu_function

if TYPE_CHECKING:
    from torch import Tensor

    from gristmill.kernels.calls import GroupedLinearCall

_LEVEL = best_config("gm_grouped_linear")


class Weights(ctypes.Structure):
    """`moe::Weights` of _expert_product_cpu.h."""

    _fields_ = (
        [(name, c_void_p) for name in ("codes", "scales", "zeros", "row_scale", "perm")]
        + [(name, c_int64) for name in ("n", "k", "columns", "group")]
        + [(name, c_int32) for name in ("format", "scale_type", "zero_type", "implicit_zero")]
    )


ARGUMENTS = (
    ctypes.POINTER(Weights),
    c_int64,
    c_void_p,
    c_int64,
    c_int64,
    c_void_p,
    c_void_p,
    c_int64,
    c_void_p,
    c_int64,
    c_void_p,
    c_int,
    c_float,
    c_float,
    c_int,
)


def launch(config: Config, call: GroupedLinearCall) -> None:
    """Sorted rows [P, K] and the five tensors of cpu_rows16_v1 -> out [P, N or N / 2]."""
    rows = call.out.shape[1] * (2 if call.silu_mul else 1)
    experts = call.expert_offsets.shape[0] - 1
    code = cpu_function("gm_grouped_linear", config["level"], ARGUMENTS)(
        ctypes.byref(weights(config, call.weight, experts, rows, call.x.shape[1])),
        experts,
        call.x.data_ptr(),
        call.x.shape[0],
        call.x.shape[1],
        call.expert_offsets.data_ptr(),
        None if call.permutation is None else call.permutation.data_ptr(),
        call.top_k,
        call.out.data_ptr(),
        call.out.shape[0],
        None if call.bias is None else call.bias.data_ptr(),
        2 if call.clamp else int(call.silu_mul),
        call.alpha,
        call.limit,
        DTYPE_CODES[dtype_name(call.x.dtype)],
    )
    check(code, "grouped_linear_cpu")


def weights(config: Config, packed: list[Tensor], experts: int, n: int, k: int) -> Weights:
    """What C++ is told of packed expert weights [experts, n, k]; ValueError if the tensors are not such."""
    codes, scales, zeros, row_scale, perm = packed
    columns, blocks, ordered = codes.shape[2] * int(config["columns"]), cdiv(n, 16), perm.numel()
    group = int(config["group"]) or columns
    if (
        codes.shape[:2] != (experts, blocks)
        or columns < k * (not ordered)
        or (ordered and ordered != columns)
    ):
        raise ValueError(
            f"expert weights: codes {tuple(codes.shape)} and perm of {ordered} do not pack [{experts}, {n}, {k}]"
        )
    need_slots("expert weights", packed, experts * blocks)
    scaled, zeroed = scales.numel(), zeros.numel()
    if (scaled and scaled != experts * blocks * (columns // group) * 16) or (zeroed and zeroed != scaled):
        raise ValueError(
            f"expert weights: scales {tuple(scales.shape)}, zeros {tuple(zeros.shape)} do not fit "
            f"[{experts}, {n}, {k}] in groups of {group}"
        )
    scale_type = NONE if not scaled else E8M0 if config["e8m0"] else DTYPE_CODES[dtype_name(scales.dtype)]
    return Weights(
        codes.data_ptr(),
        scales.data_ptr() if scaled else None,
        zeros.data_ptr() if zeroed else None,
        row_scale.data_ptr() if row_scale.numel() else None,
        perm.data_ptr() if ordered else None,
        n,
        k,
        columns,
        group,
        config["format"],
        scale_type,
        DTYPE_CODES[dtype_name(zeros.dtype)] if zeroed else NONE,
        0 if zeroed else config["zero"],
    )


def config(problem: Problem, target: Target) -> Config:
    """The code level, and what the scheme determines of packed weights (as for linear)."""
    return {**linear_config(problem, target), **_LEVEL(problem, target)}


KERNEL = Kernel(
    op="grouped_linear",
    name="grouped_linear_cpu",
    provider="gristmill",
    language="cpp",
    target=f"{__name__}:launch",
    requires=Requirement(vendors=("cpu",), code="cpp"),
    summary="linear's core over the experts that have rows",
    accepts=accepts_named,
    config=config,
    layouts=("cpu_rows16_v1",),
    batch_invariant=True,
    priority=100,
)
