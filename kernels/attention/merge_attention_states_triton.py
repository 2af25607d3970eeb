"""Merging partial attentions in Triton, for every device Triton reaches."""

from __future__ import annotations

from collections.abc import Iterable

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.target import Target


def config(problem: Problem, target: Target) -> Config:
    """Tiles of about 1,024 elements: as many rows (a token's head) as fit."""
    block = 1 << (problem.integer("d") - 1).bit_length()
    return {"rows": max(1, 1024 // block), "warps": 4}


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """Tiles of 512 to 4,096 elements."""
    block = 1 << (problem.integer("d") - 1).bit_length()
    return [
        {"rows": rows, "warps": warps}
        for rows in sorted({max(1, size // block) for size in (512, 1024, 2048, 4096)})
        for warps in (2, 4, 8)
    ]


KERNEL = Kernel(
    op="merge_attention_states",
    name="merge_attention_states_triton",
    provider="gristmill",
    language="triton",
    target="gristmill.kernels.attention._merge_attention_states_triton:launch",
    aot="gristmill.kernels.attention._merge_attention_states_triton:aot",
    requires=Requirement(code="triton"),
    summary="one program per tile of rows, float32 inside",
    config=config,
    space=space,
    batch_invariant=True,
    priority=50,
)
