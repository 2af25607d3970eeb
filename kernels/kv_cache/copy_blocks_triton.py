"""Copies of blocks in Triton: one program per block and row. It reads a part of the block, in which it has several loads under way, writes it,
and adds what it read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import next_power_of_2
from gristmill.kernel_registry.target import Target
from gristmill.kernels.aot import AotCase
from gristmill.kernels.lazy_triton import jit, tl

if TYPE_CHECKING:
    from gristmill.kernels.calls import CopyBlocksCall


def config(problem: Problem, target: Target) -> Config:
    """At most 2,048 words at a time: four vectors of 16 bytes for each of 128 threads."""
    block = min(2048, max(32, next_power_of_2(problem.integer("words"))))
    return {"block": block, "warps": max(1, min(4, block // 128))}


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """From one vector of 16 bytes per thread to eight."""
    most = max(32, next_power_of_2(problem.integer("words")))
    blocks = sorted({min(block, most) for block in (512, 1024, 2048, 4096)})
    return [
        {"block": block, "warps": warps}
        for block in blocks
        for warps in (1, 2, 4, 8)
        if warps == 1 or block >= 128 * warps
    ]


# They differ from call to call: without this, Triton would compile again for 1 and for multiples of 16.
@jit(do_not_specialize=["t", "source_count", "blocks"])  # type: ignore[call-arg, untyped-decorator]
def copy_blocks_kernel(  # type: ignore[no-untyped-def]
    source,
    cache,
    source_blocks,
    cache_blocks,
    factors,
    sums,
    t,
    source_count,
    blocks,
    source_row,
    source_block,
    cache_row,
    cache_block,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    theirs, ours = tl.load(source_blocks + index), tl.load(cache_blocks + index)
    total = tl.zeros((BLOCK,), tl.int64)
    if (theirs >= 0) & (theirs < source_count) & (ours >= 0) & (ours < blocks):
        read = source + row * source_row + theirs * source_block
        write = cache + row * cache_row + ours * cache_block
        for start in range(0, WORDS, BLOCK):
            word = start + tl.arange(0, BLOCK)
            inside = word < WORDS
            values = tl.load(read + word, mask=inside, other=0)
            tl.store(write + word, values, mask=inside)
            total += values.to(tl.int64) * tl.load(factors + word, mask=inside, other=0)
    tl.store(sums + row * t + index, tl.sum(total, 0))


def launch(config: Config, call: CopyBlocksCall) -> None:
    """The arguments of `copy_blocks.reference`. A block that one of the caches does not have is not copied."""
    rows, t = call.sums.shape
    if t:
        copy_blocks_kernel[(t, rows)](
            call.source,
            call.cache,
            call.source_blocks,
            call.cache_blocks,
            call.factors,
            call.sums,
            t,
            call.source.shape[1],
            call.cache.shape[1],
            *call.source.stride()[:2],
            *call.cache.stride()[:2],
            WORDS=call.cache.shape[2],
            BLOCK=config["block"],
            num_warps=config["warps"],
        )


def aot(target: Target) -> list[AotCase]:
    """What the compile matrix builds: parts of 32 KiB, strides past 2³¹ words."""
    pointers = dict.fromkeys(("source", "cache"), "*i32")
    pointers |= dict.fromkeys(("source_blocks", "cache_blocks", "factors", "sums"), "*i64")
    sizes = dict.fromkeys(("t", "source_count", "blocks"), "i32")
    strides = dict.fromkeys(("source_row", "source_block", "cache_row", "cache_block"), "i64")
    constants = {"WORDS": 8192, "BLOCK": 2048}
    return [AotCase("32k", copy_blocks_kernel, pointers | sizes | strides, constants, {"num_warps": 4})]


KERNEL = Kernel(
    op="copy_blocks",
    name="copy_blocks_triton",
    provider="gristmill",
    language="triton",
    target=f"{__name__}:launch",
    aot=f"{__name__}:aot",
    requires=Requirement(code="triton"),
    summary="one program per block and row",
    config=config,
    space=space,
    batch_invariant=True,
    priority=50,
)
