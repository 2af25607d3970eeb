"""Grouped top-k in Triton."""

from __future__ import annotations

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.target import Target


def config(problem: Problem, target: Target) -> Config:
    """One warp for each 256 experts."""
    return {"warps": min(8, max(1, problem.integer("e") // 256))}


KERNEL = Kernel(
    op="grouped_topk",
    name="grouped_topk_triton",
    provider="gristmill",
    language="triton",
    target="gristmill.kernels.moe._grouped_topk_triton:launch",
    aot="gristmill.kernels.moe._grouped_topk_triton:aot",
    requires=Requirement(code="triton"),
    summary="one program per token, experts in registers, repeated maximum of integer keys",
    config=config,
    batch_invariant=True,
    priority=50,
)
