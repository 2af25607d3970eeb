"""Sampling in CUDA C++ for Hopper, in one launch (`_sample_sm90.cu`): a cluster of blocks per row."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

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
    """Blocks per row (ranks), threads of each, and whether they keep the row in shared memory. The results are the same for all.

    More blocks sample a row sooner, and leave room for fewer rows at a time: the least expected time decides. A row of a few thousand tokens
    has no work for more blocks or threads.
    """
    v = problem.integer("v")
    most = next((ranks for ranks in (1, 2, 4) if v <= 2048 * ranks), MOST_RANKS)
    sizes = [ranks for ranks in (2, 4, MOST_RANKS) if ranks <= most] or [1]
    chosen = min(
        (
            Choice(ranks, 512, keep)
            for ranks in sizes
            for keep in (1, 0)
            if not keep or v <= ranks * MOST_OF_SLICE
        ),
        key=lambda choice: microseconds(problem, target, choice),
    )
    threads = next((t for t in (64, 128) if cdiv(v, chosen.ranks) <= 4 * t), chosen.threads)
    return chosen._replace(threads=threads)._asdict()


class Choice(NamedTuple):
    """A configuration."""

    ranks: int
    threads: int
    keep: int


PROCESSORS = 132
PROCESSOR_SHARED, PROCESSOR_REGISTERS, PROCESSOR_THREADS = 228 << 10, 1 << 16, 2048
"""Of a multiprocessor: bytes, registers, threads."""
REGISTERS = (64, 104)
"""Of a thread, where rows are read again and where they are kept."""
OWN_SHARED = 28 << 10
"""Bytes of a block besides its slice."""


def resident(v: int, choice: Choice) -> int:
    """Blocks that a multiprocessor has room for."""
    slice_bytes = 4 * cdiv(v, choice.ranks) if choice.keep else 0
    return max(
        1,
        min(
            PROCESSOR_THREADS // choice.threads,
            PROCESSOR_REGISTERS // (REGISTERS[choice.keep] * choice.threads),
            PROCESSOR_SHARED // (OWN_SHARED + slice_bytes),
        ),
    )


FIXED, SORTED, READ = (49.5, 36.6), 6.9, (1.12, 0.784)
"""Microseconds of the passes of a row, read again or kept; of its candidates with 512 threads; of a thread's token, read again or kept."""
FULL, FURTHER = 0.24, 0.45
"""What a multiprocessor with 1,024 threads adds to a row's time, as a part of it; what a further wave of rows does."""


def microseconds(problem: Problem, target: Target, choice: Choice) -> float:
    """Expected time of a call: of its slowest row, and of the waves of rows that the device has room for.

    Fitted to 36 times on an H200, all configurations at 20 and 200 rows of 152,064 tokens, of which it is 4 % off. Rows of that benchmark differ:
    a wave after the first one takes 0.27 times its slowest row, since clusters of quick rows make room for others. Where all rows
    have the same filters it takes nearly the whole time. `FURTHER` lies between them.
    """
    m, v = problem.integers("m", "v")
    processors = target.multiprocessors or PROCESSORS
    of_processor = resident(v, choice)
    row = (
        FIXED[choice.keep]
        + SORTED * 512 / choice.threads
        + READ[choice.keep] * v / (choice.ranks * choice.threads)
    )
    threads = min(m * choice.ranks / processors, of_processor) * choice.threads
    waves = m * choice.ranks / (of_processor * processors)
    return row * (1 + FULL * threads / 1024) * (1 + FURTHER * max(0.0, waves - 1))


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
