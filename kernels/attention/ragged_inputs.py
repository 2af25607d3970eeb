"""Random arguments of ragged attention: lengths within the bounds of a problem, and paged caches.

Contexts are in shuffled blocks, and every slot without a token is NaN, so that a read of a wrong slot is detected.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernels.attention.lengths import lengths
from gristmill.kernels.random_inputs import Draw

if TYPE_CHECKING:
    from torch import Tensor

UNUSED_BLOCK = 2**30
"""The value of table entries past the blocks of a sequence. No kernel may use it."""


class RaggedDraw(Draw):
    """The lengths of a ragged problem, and tensors drawn on its device.

    `queries` and `contexts` are the new tokens and the context of each sequence (`lengths`).
    """

    def __init__(self, problem: Problem, seed: int, device: str) -> None:
        super().__init__(problem, seed, device, source=device)
        self.seed = seed
        self.queries, self.contexts = lengths(problem, seed)

    def indices(self, values: Sequence[int]) -> Tensor:
        """int32 on the device."""
        import torch

        return torch.tensor(values, dtype=torch.int32, device=self.device)

    @cached_property
    def query_start(self) -> Tensor:
        """int32 [seqs + 1]."""
        return self.indices(starts(self.queries))

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """max_q, max_ctx."""
        return self.problem.integers("max_q", "max_ctx")

    def lse(self) -> Tensor | None:
        """float32 [q_tokens, heads] of NaN, for a problem that asks for the log-sum-exp."""
        import torch

        if not self.problem["lse"]:
            return None
        shape = self.problem.integers("q_tokens", "heads")
        return torch.full(shape, float("nan"), dtype=torch.float32, device=self.device)

    def pages(self, count: int, *row: int) -> tuple[Tensor, Tensor]:
        """`count` caches of rows of shape `row`, [count, blocks, block_size, *row], and their block table [seqs, max_blocks]."""
        import torch

        size = self.problem.integer("block_size")
        tables, blocks = block_tables(self.contexts, size, self.seed)
        caches = torch.full((count, blocks * size, *row), float("nan"), dtype=self.dtype, device=self.device)
        slots = owned_slots(tables, self.contexts, size).to(self.device)
        for cache in caches:
            cache[slots] = self.normal(len(slots), *row).to(self.dtype)
        table = table_tensor(tables, cdiv(self.problem.integer("max_ctx"), size))
        return caches.view(count, blocks, size, *row), table.to(self.device)


def starts(counts: Sequence[int]) -> list[int]:
    """Running sums of `counts` from 0: where each sequence begins, and the total."""
    return [0, *accumulate(counts)]


def block_tables(contexts: Sequence[int], block_size: int, seed: int) -> tuple[list[list[int]], int]:
    """Shuffled blocks for each context, and the number of blocks of the cache (a few are unused)."""
    counts = [cdiv(context, block_size) for context in contexts]
    blocks = sum(counts) + 3
    order = list(range(blocks))
    random.Random(seed + 1).shuffle(order)
    begin = starts(counts)
    return [order[begin[i] : begin[i + 1]] for i in range(len(contexts))], blocks


def table_tensor(rows: Sequence[Sequence[int]], width: int) -> Tensor:
    """int32 [seqs, width] of block numbers, padded by UNUSED_BLOCK."""
    import torch

    table = torch.full((len(rows), max(width, 1)), UNUSED_BLOCK, dtype=torch.int32)
    for index, row in enumerate(rows):
        table[index, : len(row)] = torch.tensor(row, dtype=torch.int32)
    return table


def owned_slots(tables: Sequence[Sequence[int]], contexts: Sequence[int], block_size: int) -> Tensor:
    """int64 slots (block · block_size + offset) of every context token, sequence after sequence."""
    import torch

    parts = [torch.zeros(0, dtype=torch.int64)]
    for row, context in zip(tables, contexts, strict=True):
        position = torch.arange(context)
        parts.append(
            torch.tensor(row, dtype=torch.int64)[position // block_size] * block_size + position % block_size
        )
    return torch.cat(parts)
