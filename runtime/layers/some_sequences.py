"""Some sequences of a step, for layers that compute not all of them in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from gristmill.runtime.batch import Batch, send_parts


@dataclass(frozen=True)
class Sequences:
    """Some sequences of a batch.

    Attributes:
        rows: their tokens in the batch.
        query_start, seq_lens, block_table: int32 [S + 1], [S] and [S, width].
        max_q, max_ctx: as in `Batch`.
    """

    rows: slice | Tensor
    query_start: Tensor
    seq_lens: Tensor
    block_table: Tensor
    max_q: int
    max_ctx: int


def whole(batch: Batch) -> Sequences:
    """All sequences of a batch."""
    return Sequences(
        slice(None), batch.query_start, batch.seq_lens, batch.block_table, batch.max_q, batch.max_ctx
    )


def others(batch: Batch, chosen: Sequence[int]) -> list[int]:
    """The indices that are not chosen, of a batch whose lengths the host knows."""
    known = set(chosen)
    return [i for i in range(len(batch.lengths)) if i not in known]


def some(batch: Batch, indices: Sequence[int]) -> Sequences:
    """Those with these indices, in ascending order, of a batch whose lengths the host knows."""
    lengths = [batch.lengths[i] for i in indices]
    max_q, max_ctx = (max(values) for values in zip(*lengths, strict=True))
    if len(indices) == len(batch.lengths):
        return Sequences(slice(None), batch.query_start, batch.seq_lens, batch.block_table, max_q, max_ctx)
    begin = [0, *accumulate(new for new, _ in batch.lengths)]
    starts = [0, *accumulate(new for new, _ in lengths)]
    device = batch.query_start.device
    rows: slice | Tensor = slice(begin[indices[0]], begin[indices[-1] + 1])
    picked: slice | Tensor = slice(indices[0], indices[-1] + 1)
    (query_start,) = send_parts((starts,), torch.int32, device)
    if indices[-1] - indices[0] + 1 != len(indices):
        tokens = [token for i in indices for token in range(begin[i], begin[i + 1])]
        rows, picked = send_parts((tokens, indices), torch.int64, device)
    return Sequences(rows, query_start, batch.seq_lens[picked], batch.block_table[picked], max_q, max_ctx)
