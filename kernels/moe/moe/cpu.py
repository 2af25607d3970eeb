"""MoE in C++ for CPUs (`_moe_cpu.cpp`): the whole chain in one call, reading only the experts that have tokens."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.target import Target
from gristmill.kernels.common import DTYPE_CODES, dtype_name
from gristmill.kernels.linear.cpu import config as linear_config
from gristmill.kernels.moe import _chain
from gristmill.kernels.moe.grouped_linear.cpu import Weights, weights
from gristmill.kernels.moe.moe.chain import accepts_named
from gristmill.kernels.native import best_config, check, cpu_function

if TYPE_CHECKING:
    from gristmill.kernels.calls import MoeCall

_LEVEL = best_config("gm_moe")
ARGUMENTS = (
    ctypes.POINTER(Weights),
    ctypes.POINTER(Weights),
    *(c_void_p,) * 11,
    *(c_int64,) * 3,
    c_int,
    *(c_float,) * 2,
    c_int,
)


def launch(config: Config, call: MoeCall) -> None:
    """x [T, H], expert weights as cpu_rows16_v1 -> out [T, H]; without a workspace it allocates one."""
    (tokens, hidden), top_k = call.x.shape, call.ids.shape[1]
    inner, experts = _chain.sizes_of(call.w13, call.inter)
    space = _chain.carve(
        call.workspace, call.x, _chain.pieces(call.ids.numel(), experts, hidden, inner, call.x.element_size())
    )
    code = cpu_function("gm_moe", config["level"], ARGUMENTS)(
        ctypes.byref(weights(config, call.w13, experts, 2 * inner, hidden)),
        ctypes.byref(weights(config, call.w2, experts, hidden, inner)),
        call.x.data_ptr(),
        call.weights.data_ptr(),
        call.ids.data_ptr(),
        None if call.w13_bias is None else call.w13_bias.data_ptr(),
        None if call.w2_bias is None else call.w2_bias.data_ptr(),
        *(piece.data_ptr() for piece in space),
        call.out.data_ptr(),
        tokens,
        top_k,
        experts,
        2 if call.clamp else 1,
        call.alpha,
        call.limit,
        DTYPE_CODES[dtype_name(call.x.dtype)],
    )
    check(code, "moe_cpu")


def config(problem: Problem, target: Target) -> Config:
    """The code level, and what the scheme says of packed weights (as for linear)."""
    return {**linear_config(problem, target), **_LEVEL(problem, target)}


KERNEL = Kernel(
    op="moe",
    name="moe_cpu",
    provider="gristmill",
    language="cpp",
    target=f"{__name__}:launch",
    requires=Requirement(vendors=("cpu",), code="cpp"),
    summary="counting sort, linear's core expert by expert, ordered float32 sum, in one call",
    accepts=accepts_named,
    config=config,
    workspace=_chain.workspace,
    layouts=("cpu_rows16_v1",),
    batch_invariant=True,
    priority=100,
)
