"""Combine in Triton."""

from __future__ import annotations

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.target import Target


def block_config(hidden: int) -> Config:
    """Up to 1024 columns per program."""
    return {"block": min(1024, max(16, 1 << (hidden - 1).bit_length())), "warps": 4}


def config(problem: Problem, target: Target) -> Config:
    """The default for the problem's width."""
    return block_config(problem.integer("h"))


KERNEL = Kernel(
    op="combine",
    name="combine_triton",
    provider="gristmill",
    language="triton",
    target="gristmill.kernels.moe._combine_triton:launch",
    aot="gristmill.kernels.moe._combine_triton:aot",
    requires=Requirement(code="triton"),
    summary="one program per token and stretch of columns, k in order",
    config=config,
    batch_invariant=True,
    priority=50,
)
