"""Sampling in Triton."""

from __future__ import annotations

from collections.abc import Iterable

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.target import Target


def config(problem: Problem, target: Target) -> Config:
    """Wide blocks for long rows; float64 scores take two registers an element."""
    return {"block": 512 if problem.integer("v") > 2048 else 256, "warps": 8 if problem.integer("v") > 2048 else 4}


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """Blocks and warps."""
    return [{"block": block, "warps": warps} for block in (256, 512, 1024) for warps in (4, 8, 16)]


KERNEL = Kernel(
    op="sample",
    name="sample_triton",
    provider="gristmill",
    language="triton",
    target="gristmill.kernels.sampling._sample_triton:launch",
    aot="gristmill.kernels.sampling._sample_triton:aot",
    requires=Requirement(code="triton"),
    summary="one program a request; filters by a search of 4 bits a pass, without sorting",
    config=config,
    space=space,
    sources=("_sample_triton.py",),
    batch_invariant=True,
    priority=50,
)
