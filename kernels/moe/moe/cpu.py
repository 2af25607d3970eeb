"""MoE in C++ for CPUs (`_moe_cpu.cpp`): the whole chain in one call, reading only the experts that have tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.cpu import config as linear_config
from gristmill.kernels.linear.cpu import need_rows16
from gristmill.kernels.moe import _chain
from gristmill.kernels.moe.moe.chain import accepts_named
from gristmill.kernels.native import best_config
from gristmill.kernels.native_call import CallEntry

if TYPE_CHECKING:
    from gristmill.kernels.calls import MoeCall

ENTRY = CallEntry("gm_moe", "moe")
_LEVEL = best_config("gm_moe")


def launch(config: Config, call: MoeCall) -> None:
    """x [T, H], expert weights as cpu_rows16_v1 -> out [T, H]; without a workspace it allocates one."""
    hidden = call.x.shape[1]
    inner, experts = _chain.sizes_of(call.w13, call.inter)
    sizes = _chain.pieces(call.ids.numel(), experts, hidden, inner, call.x.element_size())
    memory = _chain.memory(call.workspace, call.x, sizes)
    try:
        ENTRY.cpu(config, call if memory is call.workspace else call.replace(workspace=memory))
    except (TypeError, ValueError):
        rows = inner * (2 if call.gated else 1)
        need_rows16("expert weights", config, call.w13, experts, rows, hidden)
        need_rows16("expert weights", config, call.w2, experts, hidden, inner)
        raise


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
    supports=("activation", "gated"),
    workspace=_chain.workspace,
    layouts=("cpu_rows16_v1",),
    batch_invariant=True,
    priority=100,
)
