"""What the kernels of grouped top-k in CUDA C++ have in common, a warp per token (`_rows.cuh`)."""

from __future__ import annotations

from collections.abc import Iterable

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.target import Target

MOST_EXPERTS = 1024
"""Of a warp, whose lanes keep 32 each in registers."""
MOST_GROUPS = 32
"""A lane, at least, decides on a group."""
PROCESSORS = 108
"""Of a device that does not say how many it has."""
BLOCKS = 16
"""Of a multiprocessor at a time, on devices that take the fewest."""


def accepts(problem: Problem) -> str | None:
    """None, or the reason why not."""
    e, n_group, topk_group = problem.integers("e", "n_group", "topk_group")
    if e > MOST_EXPERTS:
        return f"made for up to {MOST_EXPERTS} experts, not {e}"
    if topk_group < n_group > MOST_GROUPS:
        return f"chooses among up to {MOST_GROUPS} groups, not {n_group}"
    return None


def config(problem: Problem, target: Target) -> Config:
    """Warps of a block: one as long as the device takes all blocks at a time, so that no place waits for the slowest warp of a block."""
    alone = problem.integer("m") <= BLOCKS * (target.multiprocessors or PROCESSORS)
    return {"warps": 1 if alone else 4}


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """One, two or four warps of a block."""
    return [{"warps": warps} for warps in (1, 2, 4)]


EXAMPLES = (
    "m=7,e=257,top_k=40,x=bf16",
    "m=257,e=1024,top_k=8,n_group=32,topk_group=3,scoring=sigmoid,bias=true",
    "m=300,e=160,top_k=6,n_group=8,topk_group=3,x=bf16,scoring=sigmoid",
    "m=5,e=96,top_k=8,n_group=3,topk_group=2,x=fp16,bias=true,renormalize=false",
)


def kernel(module: str, name: str, requires: Requirement, priority: int, overlaps: bool = False) -> Kernel:
    """The kernel `name`, whose launcher is in `module`.

    overlaps: it starts while the kernel before ends, and lets the next one do so.
    """
    return Kernel(
        op="grouped_topk",
        name=name,
        provider="gristmill",
        language="cuda",
        target=f"{module}:launch",
        requires=requires,
        summary="a warp per token: its experts in registers, sorted by lane, then a reduction of 32 bits for each place",
        accepts=accepts,
        config=config,
        space=space,
        examples=EXAMPLES,
        batch_invariant=True,
        waits=overlaps,
        triggers=overlaps,
        priority=priority,
    )
