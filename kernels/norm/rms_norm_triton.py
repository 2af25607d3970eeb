"""RMSNorm in Triton, for every device Triton reaches."""

from __future__ import annotations

from collections.abc import Iterable

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.target import Target

LONGEST_ROW = 16384


def config(problem: Problem, target: Target) -> Config:
    """The whole row in registers while it fits, one warp for each 512 elements of it."""
    block = min(LONGEST_ROW, max(64, 1 << (problem.integer("n") - 1).bit_length()))
    return {"block": block, "warps": min(16, max(1, block // 512))}


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """The same block at other warp counts."""
    block = config(problem, target)["block"]
    return [{"block": block, "warps": warps} for warps in (1, 2, 4, 8, 16)]


KERNEL = Kernel(
    op="rms_norm",
    name="rms_norm_triton",
    provider="gristmill",
    language="triton",
    target="gristmill.kernels.norm._rms_norm_triton:launch",
    aot="gristmill.kernels.norm._rms_norm_triton:aot",
    requires=Requirement(code="triton"),
    summary="one program per row, float32 inside",
    config=config,
    space=space,
    batch_invariant=True,
    priority=50,
)
