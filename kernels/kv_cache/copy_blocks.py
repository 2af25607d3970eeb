"""Copying blocks of a paged cache from another one, which may be that of another process, and hashing them in the same pass.

A block has a part in each row of a plane (`gristmill.runtime.kv_transfer.layout`), and other blocks are its neighbours there: copies of
scattered blocks are many and short. The hash of a part is a sum of its words times fixed factors (multilinear hashing, Carter and Wegman, 1979),
of what was read: who knows it can tell whether that was whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.arguments import VECTORS, Tensor
from gristmill.kernel_registry.op import Cost, Op, Tolerance
from gristmill.kernel_registry.problem import Axis, Problem, problems
from gristmill.kernels.common import need
from gristmill.kernels.random_inputs import Draw

if TYPE_CHECKING:
    import torch

NAME = "copy_blocks"
SHRUNK_ROWS, SHRUNK_BLOCKS = 5, 33
"""Rows and blocks of a verification at most: they are computed independently of each other."""


def reference(
    source: torch.Tensor,
    cache: torch.Tensor,
    source_blocks: torch.Tensor,
    cache_blocks: torch.Tensor,
    factors: torch.Tensor,
) -> torch.Tensor:
    """source int32 [rows, source blocks, words]; cache int32 [rows, blocks, words], written in place; factors int64 [words].

    Block source_blocks[i] (int64 [T]) goes to block cache_blocks[i] in every row. No block of the cache is named twice. Returns the sums over
    the words of source · factors, modulo 2^64: int64 [rows, T].

    A block that is not there is an error: on a CPU it raises; a device kernel, which cannot raise without synchronising, reads and writes nothing.
    """
    import torch

    for what, blocks, held in (("source", source_blocks, source), ("cache", cache_blocks, cache)):
        if blocks.device.type == "cpu" and blocks.numel():
            low, high = (int(end) for end in blocks.aminmax())
            need(
                low >= 0 and high < held.shape[1],
                f"{NAME}: {what} has {held.shape[1]} blocks, got {low} to {high}",
            )
    picked = source.index_select(1, source_blocks)
    cache.index_copy_(1, cache_blocks, picked)
    return torch.sum(picked * factors, -1)


def inputs(problem: Problem, seed: int, device: str) -> list[torch.Tensor]:
    """Random words, blocks in any order, and rows that are longer than their blocks on one side."""
    import torch

    rows, t, words = problem.integers("rows", "t", "words")
    draw = Draw(problem, seed, device)
    limits = torch.iinfo(torch.int32)

    def plane(blocks: int) -> torch.Tensor:
        shape = (rows, blocks, words)
        return torch.randint(limits.min, limits.max, shape, dtype=torch.int32, generator=draw.generator)

    def chosen(blocks: int) -> torch.Tensor:
        return torch.randperm(blocks, generator=draw.generator)[:t].to(device)

    source = plane(t + 4)[:, : t + 3]
    factors = torch.randint(-(1 << 62), 1 << 62, (words,), generator=draw.generator)
    planes = [source.to(device), plane(2 * t + 1).to(device)]
    return [*planes, chosen(t + 3), chosen(2 * t + 1), factors.to(device)]


def cost(problem: Problem) -> Cost:
    """Every word read once and written once."""
    rows, t, words = problem.integers("rows", "t", "words")
    return Cost(bytes=8 * rows * t * words, flops=0)


def shrink(problem: Problem) -> Problem:
    """Fewer rows and blocks, of whole parts."""
    rows, t = problem.integers("rows", "t")
    return problem.with_values(rows=min(rows, SHRUNK_ROWS), t=min(t, SHRUNK_BLOCKS))


OP = Op(
    name=NAME,
    family="kv_cache",
    summary="blocks of another cache into a paged cache, with their hashes",
    axes=(
        Axis("t", "int", "blocks", dynamic=True),
        Axis("rows", "int", "parts of a block", minimum=1),
        Axis("words", "int", "words of 4 bytes of a part", minimum=1),
    ),
    arguments=(
        Tensor("source", "rows source_count words", dtype="int32", strides=VECTORS),
        Tensor("cache", "rows blocks words", dtype="int32", strides=VECTORS, mutable=True),
        Tensor("source_blocks", "t", dtype="int64"),
        Tensor("cache_blocks", "t", dtype="int64"),
        Tensor("factors", "words", dtype="int64"),
    ),
    returns=(Tensor("sums", "rows t", dtype="int64"),),
    reference=reference,
    inputs=inputs,
    cost=cost,
    tolerance=lambda problem: Tolerance("exact", 0.0),
    bucket="t",
    shrink=shrink,
    examples=problems(
        """
        t=0,rows=2,words=8  t=1,rows=1,words=1  t=7,rows=3,words=33  t=5,rows=2,words=1000  t=33,rows=4,words=2050
        """
    ),
    bench=("t=64,rows=64,words=8192", "t=2048,rows=64,words=8192"),
)
