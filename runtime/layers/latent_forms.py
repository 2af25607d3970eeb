"""Which form of latent attention each sequence of a step takes, by the arithmetic of both, and what the forms read.

The choice depends on the lengths of the sequence only, not on the other requests of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from gristmill.runtime.batch import Batch, send_parts
from gristmill.runtime.config import MlaConfig

EXPANDING = 2.0
"""Cost of a multiplication that makes keys and values of cached tokens, relative to one of attention: they are written and read again.
docs/performance/mla_prefill_hopper.md has the times of both forms."""


def expands(new: int, context: int, mla: MlaConfig) -> bool:
    """Whether the un-absorbed form takes less than the absorbed one for `new` tokens that are the last of `context`.

    It has fewer multiplications for each pair of query and key, and makes the keys and values of all tokens. Of the new ones that is as
    much as the absorbed form's projections of their queries and results, of cached ones it is more. A single token is absorbed, as it is
    in a captured step.
    """
    pairs = new * context - new * (new - 1) // 2
    saved = pairs * (2 * mla.kv_lora_rank + mla.rope_dim - mla.qk_dim - mla.v_dim)
    made = (context - new) * mla.kv_lora_rank * (mla.nope_dim + mla.v_dim)
    return new > 1 and saved > EXPANDING * made


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


@dataclass(frozen=True)
class Expanded(Sequences):
    """The sequences in the un-absorbed form.

    Attributes:
        context_start: int32 [S + 1], where the context of each sequence begins in `slots`.
        slots: int64, where the latents of the contexts are in the cache; None = all of their tokens are new.
    """

    context_start: Tensor
    slots: Tensor | None


@dataclass(frozen=True)
class Forms:
    """The sequences of a batch in either form; None where there are none."""

    expanded: Expanded | None
    absorbed: Sequences | None


def whole(batch: Batch) -> Sequences:
    """All sequences of a batch."""
    return Sequences(
        slice(None), batch.query_start, batch.seq_lens, batch.block_table, batch.max_q, batch.max_ctx
    )


def split(batch: Batch, mla: MlaConfig, block_size: int) -> Forms:
    """The forms of the sequences of a batch, from the lengths that the host knows; absorbed if it knows none.

    A cache that is sharded over ranks has no context as a whole: there all sequences are un-absorbed if they are new, and absorbed otherwise.
    """
    lengths = batch.lengths
    if batch.context_shard is None:
        chosen = [i for i, (new, context) in enumerate(lengths) if expands(new, context, mla)]
    else:
        chosen = [*range(len(lengths))] if all(new == context for new, context in lengths) else []
    if not chosen:
        return Forms(None, whole(batch))
    others = [i for i in range(len(lengths)) if i not in set(chosen)]
    return Forms(_expanded(batch, chosen, block_size), _some(batch, others) if others else None)


def _some(batch: Batch, indices: Sequence[int]) -> Sequences:
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


def _expanded(batch: Batch, indices: Sequence[int], block_size: int) -> Expanded:
    some = _some(batch, indices)
    values = some.rows, some.query_start, some.seq_lens, some.block_table, some.max_q, some.max_ctx
    contexts = [batch.lengths[i][1] for i in indices]
    if all(batch.lengths[i][0] == batch.lengths[i][1] for i in indices):
        return Expanded(*values, some.query_start, None)
    device, total = some.query_start.device, sum(contexts)
    (context_start,) = send_parts(([0, *accumulate(contexts)],), torch.int32, device)
    sequence = torch.arange(len(indices), device=device).repeat_interleave(
        context_start.diff(), output_size=total
    )
    position = torch.arange(total, device=device) - context_start[sequence]
    block = some.block_table[sequence, position // block_size].long()
    return Expanded(*values, context_start, block * block_size + position % block_size)
