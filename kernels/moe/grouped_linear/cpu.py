"""Grouped linear in C++ for CPUs (`_grouped_linear_cpu.cpp`): linear's core, expert by expert, only those that have rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.cpu import config as linear_config
from gristmill.kernels.linear.cpu import need_rows16
from gristmill.kernels.moe.grouped_linear.torch import accepts_named
from gristmill.kernels.native import best_config
from gristmill.kernels.native_call import CallEntry

if TYPE_CHECKING:
    from gristmill.kernels.calls import GroupedLinearCall

ENTRY = CallEntry("gm_grouped_linear", "grouped_linear")
_LEVEL = best_config("gm_grouped_linear")


def launch(config: Config, call: GroupedLinearCall) -> None:
    """Sorted rows [P, K] and the five tensors of cpu_rows16_v1 -> out [P, N or N / 2]."""
    try:
        ENTRY.cpu(config, call)
    except (TypeError, ValueError):
        rows = call.out.shape[1] * (2 if call.silu_mul else 1)
        need_rows16(
            "expert weights", config, call.weight, call.expert_offsets.shape[0] - 1, rows, call.x.shape[1]
        )
        raise


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
