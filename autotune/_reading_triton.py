"""A Triton kernel that reads a given number of bytes and does nothing else."""

from __future__ import annotations

import triton
import triton.language as tl

SHAPES = ((1024, 1, 4), (1024, 2, 4), (2048, 1, 8), (1024, 2, 8), (2048, 2, 8), (512, 1, 4))
"""Elements of a block, blocks of a program, warps: those of twelve that were ever the fastest on an H200, and a smaller one."""


@triton.jit
def read(data, sink, count, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """Sum `count` int32 of `data` by programs, wrapping around. A program whose sum is not 0 writes it to its place in `sink`:
    none does, and none can know before it has read everything, where neighbouring numbers cancel each other."""
    total = tl.zeros((BLOCK,), tl.int32)
    base = tl.program_id(0).to(tl.int64) * (BLOCK * PARTS)
    for part in tl.static_range(PARTS):
        at = base + part * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(data + at, mask=at < count, other=0)
    block_sum = tl.sum(total)
    tl.store(sink + tl.program_id(0), block_sum, mask=block_sum != 0)
