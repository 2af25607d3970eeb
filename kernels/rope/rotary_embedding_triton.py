"""Rotary embedding in Triton, for every device Triton reaches."""

from __future__ import annotations

from collections.abc import Iterable

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.target import Target


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def config(problem: Problem, target: Target) -> Config:
    """Heads of a token in tiles of about 1,024 pairs."""
    block = _power(problem.integer("rot") // 2)
    most = _power(max(problem.integer("hq"), problem.integer("hk")))
    return {"heads": max(1, min(most, 1024 // block)), "warps": 4}


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """Tiles from one head to all of them."""
    most = _power(max(problem.integer("hq"), problem.integer("hk")))
    return [
        {"heads": heads, "warps": warps}
        for heads in (1, 2, 4, 8, 16, 32, 64)
        if heads <= most
        for warps in (1, 2, 4, 8)
    ]


KERNEL = Kernel(
    op="rotary_embedding",
    name="rotary_embedding_triton",
    provider="gristmill",
    language="triton",
    target="gristmill.kernels.rope._rotary_embedding_triton:launch",
    aot="gristmill.kernels.rope._rotary_embedding_triton:aot",
    requires=Requirement(code="triton"),
    summary="one program per token and tile of heads of q or k, float32 inside",
    config=config,
    space=space,
    batch_invariant=True,
    priority=50,
)
