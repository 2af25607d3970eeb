"""Attention over dense sequences in Triton, for every device Triton reaches."""

from __future__ import annotations

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.target import Target
from gristmill.kernels.attention.tiles import tile_config

LARGEST_HEAD = 256


def accepts(problem: Problem) -> str | None:
    """Heads of up to 256 elements: wider ones do not fit in registers."""
    widest = max(problem.integer("qk_dim"), problem.integer("v_dim"))
    return f"heads of {widest} elements are over {LARGEST_HEAD}" if widest > LARGEST_HEAD else None


def config(problem: Problem, target: Target) -> Config:
    """One tile whatever the batch is: the same row then always takes the same steps."""
    return tile_config(
        problem.integer("qk_dim"),
        problem.integer("v_dim"),
        problem.text("x"),
        32 if problem.text("x") == "fp32" else 64,
        target,
    )


KERNEL = Kernel(
    op="varlen_attention",
    name="varlen_attention_triton",
    provider="gristmill",
    language="triton",
    target="gristmill.kernels.attention._varlen_attention_triton:launch",
    aot="gristmill.kernels.attention._varlen_attention_triton:aot",
    requires=Requirement(code="triton"),
    summary="a tile of queries of a head at a time, one pass over the context",
    accepts=accepts,
    config=config,
    batch_invariant=True,
    priority=50,
)
