"""Sampling in CUDA C++ for Hopper, in one launch (`_sample_sm90.cu`): a cluster of blocks per row."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernel_registry.target import Target
from gristmill.kernels.native_call import CallEntry

if TYPE_CHECKING:
    from gristmill.kernels.calls import SampleCall

MOST_RANKS = 8
"""Blocks of a cluster: more are not portable."""
MOST_OF_SLICE = 51200
"""Tokens whose scaled logits fit in a block's shared memory."""
LARGEST = 2**24
"""Tokens of a vocabulary at most: probabilities of more would sum too coarsely."""
ENTRY = CallEntry("gm_sample_sm90", "sample")


def accepts(problem: Problem) -> str | None:
    """Vocabularies whose probabilities sum exactly at a resolution of 2^-37."""
    v = problem.integer("v")
    return None if v <= LARGEST else f"vocabularies of up to {LARGEST} tokens, got {v}"


def config(problem: Problem, target: Target) -> Config:
    """Blocks per row (ranks), threads of each, and whether they keep the row in shared memory. The results are the same for all."""
    m, v = problem.integer("m"), problem.integer("v")
    keep = m <= 24 and v <= MOST_RANKS * MOST_OF_SLICE
    # A row by itself is fastest in many blocks. With more rows than the device runs so at a time, fewer blocks per row
    # wait less for each other.
    if m <= 24:
        most, threads = MOST_RANKS, 512 if m <= 8 else 256
    elif v > 65536:
        most, threads = (MOST_RANKS, 256) if m <= 96 else (2, 512)
    else:
        most, threads = 4 if m <= 48 else 2, 512
    ranks = min(next((ranks for ranks in (1, 2, 4) if v <= 2048 * ranks), MOST_RANKS), most)
    threads = next((t for t in (64, 128) if cdiv(v, ranks) <= 4 * t), threads)
    return {"ranks": ranks, "threads": threads, "keep": int(keep)}


def space(problem: Problem, target: Target) -> Iterable[Config]:
    v = problem.integer("v")
    return [
        {"ranks": ranks, "threads": threads, "keep": keep}
        for ranks in (1, 2, 4, MOST_RANKS)
        for threads in (128, 256, 512)
        for keep in (0, 1)
        if not keep or v <= ranks * MOST_OF_SLICE
    ]


def launch(config: Config, call: SampleCall) -> None:
    """logits [B, V], rows of any stride and alignment -> ids [B]. Needs no workspace."""
    ENTRY.cuda(config, call, call.logits.get_device())


KERNEL = Kernel(
    op="sample",
    name="sample_sm90",
    provider="gristmill",
    language="cuda",
    target=f"{__name__}:launch",
    requires=Requirement(features=(frozenset({"wgmma", "tma"}),), vendors=("nvidia",), code="cuda:sm_90a"),
    summary="one launch: a cluster per row holds it in shared memory; histograms bound, sorted candidates decide",
    accepts=accepts,
    config=config,
    space=space,
    batch_invariant=True,
    waits=True,
    priority=60,
    proven="sm_90: NVIDIA H200",
)
