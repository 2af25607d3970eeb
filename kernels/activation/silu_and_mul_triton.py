"""silu(gate) · up in Triton, for every device Triton reaches."""

from __future__ import annotations

from collections.abc import Iterable

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.target import Target

LARGEST_BLOCK = 1024


def config(problem: Problem, target: Target) -> Config:
    """Blocks of at most 1,024 columns, eight elements per thread."""
    block = min(LARGEST_BLOCK, max(32, 1 << (problem.integer("n") - 1).bit_length()))
    return {"block": block, "warps": max(1, block // 256)}


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """Column blocks from 256 to 4,096 at the warp counts that give a thread 4 to 16 elements."""
    longest = 1 << (problem.integer("n") - 1).bit_length()
    blocks = sorted({min(block, max(32, longest)) for block in (256, 512, 1024, 2048, 4096)})
    return [
        {"block": block, "warps": warps}
        for block in blocks
        for warps in (1, 2, 4, 8)
        if 4 <= block // (32 * warps) <= 16 or len(blocks) == 1
    ]


KERNEL = Kernel(
    op="silu_and_mul",
    name="silu_and_mul_triton",
    provider="gristmill",
    language="triton",
    target="gristmill.kernels.activation._silu_and_mul_triton:launch",
    aot="gristmill.kernels.activation._silu_and_mul_triton:aot",
    requires=Requirement(code="triton"),
    summary="one program per row and block of columns, float32 inside",
    config=config,
    space=space,
    batch_invariant=True,
    priority=50,
)
