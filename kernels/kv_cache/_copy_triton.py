"""A block of elements of a token, copied to its slot of a paged cache; and how many elements a program takes."""

from __future__ import annotations

from collections.abc import Iterable

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.scheme import next_power_of_2
from gristmill.kernels.lazy_triton import jit, tl


@jit
def copy(
    source,
    cache,
    token,
    slot,
    part,
    source_token,
    source_head,
    cache_block,
    cache_place,
    cache_head,
    heads,
    size: tl.constexpr,
    block_size,
    BLOCK: tl.constexpr,
):
    element = part * BLOCK + tl.arange(0, BLOCK)
    inside = element < heads * size
    head, offset = (element // size).to(tl.int64), element % size
    values = tl.load(source + token * source_token + head * source_head + offset, mask=inside)
    place = cache + (slot // block_size) * cache_block + (slot % block_size) * cache_place
    tl.store(place + head * cache_head + offset, values, mask=inside)


def block_config(row: int) -> Config:
    """Blocks of at most 1,024 of the `row` elements of a token."""
    block = min(1024, max(16, next_power_of_2(row)))
    return {"block": block, "warps": max(1, block // 256)}


def block_space(row: int) -> Iterable[Config]:
    """Blocks from 256 to 4,096 elements."""
    blocks = sorted({min(block, max(16, next_power_of_2(row))) for block in (256, 512, 1024, 2048, 4096)})
    return [
        {"block": block, "warps": warps}
        for block in blocks
        for warps in (1, 2, 4)
        if block >= 32 * warps or warps == 1
    ]
