"""Attention within chunks (Llama 4): a query sees the keys of its own chunk of positions, from the chunk's first token to itself.

Tokens of a sequence that are in one chunk are a sequence of their own for the kernel: its block table begins at the chunk's first block, its
length counts from there. No kernel knows of chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gristmill.runtime.batch import Batch, send_parts


@dataclass(frozen=True)
class Chunks:
    """The parts of a step that are each in one chunk, as sequences; attributes are those of `Batch`."""

    block_table: Tensor
    query_start: Tensor
    seq_lens: Tensor
    max_q: int
    max_ctx: int


def chunked(batch: Batch, size: int, block_size: int) -> Batch | Chunks:
    """The step within chunks of `size` tokens, a multiple of block_size; the batch itself where all of it is in first chunks.

    Where the host does not know lengths, in a step that is captured, every token is a sequence.
    """
    if batch.max_ctx <= size:
        return batch
    if not batch.lengths:
        return _by_token(batch, size, block_size)
    rows, firsts, starts, lengths = list[int](), list[int](), [0], list[int]()
    for row, (count, context) in enumerate(batch.lengths):
        at = context - count
        while at < context:
            end = min(context, at - at % size + size)
            rows.append(row)
            firsts.append(at // size)
            starts.append(starts[-1] + end - at)
            lengths.append(end - at // size * size)
            at = end
    device = batch.positions.device
    place, first = send_parts((rows, firsts), torch.int64, device)
    query_start, seq_lens = send_parts((starts, lengths), torch.int32, device)
    most = max(end - start for start, end in zip(starts, starts[1:], strict=False))
    table = _tables(batch.block_table[place], first, size // block_size)
    return Chunks(table, query_start, seq_lens, most, max(lengths))


def _by_token(batch: Batch, size: int, block_size: int) -> Chunks:
    count, positions = len(batch.tokens), batch.positions
    rows = batch.block_table.repeat_interleave(batch.query_start.diff(), 0, output_size=count)
    table = _tables(rows, positions // size, size // block_size)
    query_start = torch.arange(count + 1, dtype=torch.int32, device=positions.device)
    return Chunks(table, query_start, (positions % size + 1).to(torch.int32), 1, size)


def _tables(rows: Tensor, chunk: Tensor, width: int) -> Tensor:
    """Of each row of a block table, the `width` blocks of a chunk; what is behind its end is not read."""
    columns = chunk[:, None] * width + torch.arange(width, device=rows.device)
    return rows.gather(1, columns.clamp_(max=rows.shape[1] - 1))
