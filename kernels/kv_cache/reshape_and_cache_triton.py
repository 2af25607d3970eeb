"""Paged cache writes in Triton, for every device Triton reaches."""

from __future__ import annotations

from collections.abc import Iterable

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.target import Target


def _longest(problem: Problem) -> int:
    row = problem.integer("h") * max(problem.integer("d"), problem.integer("dv"))
    return 1 << (row - 1).bit_length()


def config(problem: Problem, target: Target) -> Config:
    """Blocks of at most 1,024 elements of a token."""
    block = min(1024, max(16, _longest(problem)))
    return {"block": block, "warps": max(1, block // 256)}


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """Blocks from 256 to 4,096 elements."""
    blocks = sorted({min(block, max(16, _longest(problem))) for block in (256, 512, 1024, 2048, 4096)})
    return [
        {"block": block, "warps": warps}
        for block in blocks
        for warps in (1, 2, 4)
        if block >= 32 * warps or warps == 1
    ]


KERNEL = Kernel(
    op="reshape_and_cache",
    name="reshape_and_cache_triton",
    provider="gristmill",
    language="triton",
    target="gristmill.kernels.kv_cache._reshape_and_cache_triton:launch",
    aot="gristmill.kernels.kv_cache._reshape_and_cache_triton:aot",
    requires=Requirement(code="triton"),
    summary="one program per token and block of its elements",
    config=config,
    space=space,
    batch_invariant=True,
    priority=50,
)
